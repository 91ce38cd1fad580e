"""The tensors of a TensorRT-LLM checkpoint under the names of Hugging Face, with the shards of all ranks merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.tensorrt_llm.config import rank_counts
from stoker.builder.checkpoint.tensorrt_llm.expert_keys import MIGRATION
from stoker.builder.checkpoint.tensorrt_llm.families.table import family_of
from stoker.builder.checkpoint.tensorrt_llm.fused_rows import RowPart, row_order, row_parts
from stoker.builder.checkpoint.tensorrt_llm.shards import ShardReader, Shards, Stage, followed_by
from stoker.builder.checkpoint.tensorrt_llm.smoothquant import QUANTIZING_FACTORS, check_magnitude, smoothquant_scales
from stoker.builder.checkpoint.tensorrt_llm.tensors import NO_EFFECT, SUFFIXES, Module, Split, integer_bits, parse_layer_name, split_of
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo

Finish = Callable[[Tensor], Tensor]  # what is done to the merged tensor, such as moving its rows
Select = Callable[[list[Tensor]], list[Tensor]]  # the parts of each rank's tensor that belong to a tensor


@dataclass(frozen=True, slots=True)
class _Merged:
    """A tensor of the Hugging Face checkpoint, made of one tensor of each rank of a stage."""

    shards: Shards
    info: TensorInfo
    split: Split
    select: Select
    finish: Finish


def _unchanged(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def _all(parts: list[Tensor]) -> list[Tensor]:
    """All rows of all ranks."""
    return parts


class TensorRTLLMWeights(CheckpointWeights):
    """The tensors of `rank*.safetensors`. `config` is the checkpoint's config.json, and `hugging_face` its equivalent.

    Raises CheckpointError for a missing file, a tensor that is not known, and shards that do not fit together.
    """

    def __init__(self, path: Path, config: dict[str, Any], hugging_face: dict[str, Any]) -> None:
        self._path, self._config, self._hugging_face = path, config, hugging_face
        family = family_of(config)
        assert family is not None, "hugging_face_config rejects other architectures"
        self._family = family
        self._is_smoothquant = smoothquant_scales((config.get("quantization") or {}).get("quant_algo")) is not None
        self._reader = ShardReader(
            integer_bits((hugging_face.get("quantization_config") or {}).get("quant_algo")),
            smoothquant_scales((config.get("quantization") or {}).get("quant_algo")),
        )
        self._num_experts = hugging_face.get(family.num_experts_key, 0)
        self._tp, stages = rank_counts(config, str(path))
        self.files = [path / f"rank{rank}.safetensors" for rank in range(self._tp * stages)]
        if missing := [file for file in self.files if not file.is_file()]:
            raise CheckpointError(
                f"{missing[0]} is missing: config.json describes {len(self.files)} ranks.", cure="Copy the files of all ranks."
            )
        self._merged: dict[str, _Merged] = {}
        self._experts: dict[str, list[str]] = {}  # stacked tensor → those of its experts, which are not in `tensors`
        first_layer = 0
        for index in range(stages):
            stage = [SafetensorsWeights([file]) for file in self.files[index * self._tp : (index + 1) * self._tp]]
            first_layer += self._add_stage(stage, first_layer)
        self._check_vocabulary()
        hidden = {expert for experts in self._experts.values() for expert in experts}
        self.tensors = {name: merged.info for name, merged in self._merged.items() if name not in hidden}
        for name, experts in self._experts.items():
            info = self._merged[experts[0]].info
            self.tensors[name] = TensorInfo((len(experts), *info.shape), info.dtype)

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield self.read(name).flatten()

    def read(self, name: str) -> Tensor:
        if name in self._experts:
            return torch.stack([self.read(expert) for expert in self._experts[name]])
        merged = self._merged[name]
        parts = merged.select([merged.shards.load(rank) for rank in merged.shards.stage])
        if merged.split == "same":
            # Early converters give the bias of a sum over ranks to the first rank only.
            others = [part for part in parts[1:] if not (name.endswith(".bias") and not part.any())]
            if any(not _equal(parts[0], part) for part in others):
                raise CheckpointError(
                    f"{self.location(name)} differs between ranks, which one weight cannot represent.",
                    cure=f"Convert the checkpoint with tp_size=1. {MIGRATION}",
                )
            return merged.finish(parts[0]).reshape(merged.info.shape).contiguous()
        axis = 0 if merged.split == "rows" else -1
        joined = torch.cat([_bytes(part) for part in parts], axis).view(parts[0].dtype)
        if self._is_smoothquant and joined.dtype == torch.int8:
            check_magnitude(joined, self.location(name))
        return merged.finish(joined)[: merged.info.shape[0]].contiguous()

    def location(self, name: str) -> str:
        shards = self._merged[self._experts[name][0] if name in self._experts else name].shards
        return shards.stage[0].location(shards.name)

    def _add_stage(self, stage: Stage, first_layer: int) -> int:
        """Add the tensors of one pipeline stage. Returns the number of its layers."""
        names = set(stage[0].tensors)
        for rank in stage[1:]:
            if different := sorted(names.symmetric_difference(rank.tensors)):
                raise CheckpointError(f"{rank.files[0]}: not all ranks have {different[0]}.", cure=DOWNLOAD_AGAIN)
        layers = set()
        for name in sorted(names):
            if wrong := [rank for rank in stage if 0 in rank.tensors[name].shape]:
                raise CheckpointError(f"{wrong[0].location(name)} has no elements.", cure=DOWNLOAD_AGAIN)
            if (parsed := parse_layer_name(name)) is None:
                self._add_outer(stage, name)
                continue
            layers.add(parsed[0])
            if not NO_EFFECT.match(name):
                self._add_layer_tensor(stage, name, first_layer + parsed[0], *parsed[1:])
        if layers != set(range(len(layers))):
            raise CheckpointError(f"{stage[0].files[0]}: the layers of a stage are not numbered from 0.", cure=DOWNLOAD_AGAIN)
        return len(layers)

    def _add_outer(self, stage: Stage, name: str) -> None:
        """Add an embedding, a norm or the head, without the padding of the vocabulary."""
        module, _, suffix = name.replace("transformer.embedding.", "transformer.").replace("backbone.", "transformer.").rpartition(".")
        if module not in self._family.outer or suffix not in SUFFIXES:
            raise self._unknown(stage, name)
        split: Split = "rows" if module == "lm_head" else "same"
        sizes = {"transformer.vocab_embedding": "vocab_size", "transformer.position_embedding": "max_position_embeddings"}
        if module in sizes and self._is_split(stage, name, sizes[module]):
            split = "rows" if self._config.get("embedding_sharding_dim", 0) == 0 else "columns"
        finish = self._finish_norm(module, suffix)
        rows = self._config.get(sizes.get(module, "vocab_size")) if module == "lm_head" or module in sizes else None
        if module == "transformer.position_embedding" and self._family.position_rows:
            finish, rows = partial(_with_rows_before, count=self._family.position_rows), None
        new = f"{self._family.outer[module]}.{SUFFIXES[suffix]}"
        self._add(new, self._reader.shards(stage, name, suffix), split, finish=finish, rows=rows if type(rows) is int else None)

    def _finish_norm(self, module: str, suffix: str) -> Finish:
        """What is done to a tensor of a module that may be a norm: TensorRT-LLM adds 1 to the weights of Gemma and Nemotron."""
        is_norm = module.endswith(("layernorm", "ln_f")) and suffix == "weight"
        return partial(_minus, offset=self._family.norm_offset) if is_norm and self._family.norm_offset else _unchanged

    def _is_split(self, stage: Stage, name: str, size: str) -> bool:
        """Whether ranks have parts of an embedding. use_parallel_embedding is ignored by some converters, so the shape decides."""
        return len(stage) > 1 and stage[0].tensors[name].shape != (self._config.get(size), self._config.get("hidden_size"))

    def _add_layer_tensor(self, stage: Stage, name: str, layer: int, module: str, suffix: str) -> None:
        """Add the tensors of a layer that one tensor of the ranks makes: three of a fused q, k and v."""
        prefix = self._family.layers.format(layer)
        if module == "attention" and suffix in ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor"):
            self._add_cache_scale(stage, name, prefix, suffix)
            return
        if suffix in QUANTIZING_FACTORS and self._is_smoothquant:
            return
        if (parameter := self._family.parameters.get(f"{module}.{suffix}")) is not None:
            self._add_parts(self._reader.shards(stage, name, suffix), prefix, parameter, "")
            return
        has_router = f"transformer.layers.{name.split('.')[2]}.mlp.router.weight" in stage[0].tensors
        known = (self._family.modules if has_router else self._family.modules_without_experts).get(module)
        if known is None or suffix not in SUFFIXES:
            raise self._unknown(stage, name)
        if known.of_experts:
            self._add_experts(stage, name, prefix, known, suffix)
            return
        shards = self._reader.shards(stage, name, suffix)
        if known.followed_by:
            other = name.replace(f"{module}.{suffix}", f"{known.followed_by}.{suffix}")
            if other not in stage[0].tensors:
                raise CheckpointError(f"{stage[0].files[0]}: {other} is missing.", cure=DOWNLOAD_AGAIN)
            shards = followed_by(shards, self._reader.shards(stage, other, suffix))
        self._add_parts(shards, prefix, known, suffix, self._finish_norm(module, suffix))

    def _add_parts(self, shards: Shards, prefix: str, module: Module, suffix: str, finish: Finish = _unchanged) -> None:
        """Add the tensors of the parts of a module: rows of a fused one, otherwise the same tensor for all.

        An empty `suffix` is that of a tensor whose parts have full names.
        """
        split = split_of(module, suffix, shards.info.shape)
        ending = f".{SUFFIXES[suffix]}" if suffix else ""
        if shards.info.shape not in ((), (1,)) and (
            module.sizes is not None or (split == "rows" and (len(module.parts) > 1 or module.layout))
        ):
            self._add_fused(shards, prefix, module, ending, split)
            return
        for part in module.parts:
            self._add(
                f"{prefix}{part}{ending}", shards, split, finish=module.finish if module.finish and suffix in ("", "weight") else finish
            )

    def _add_cache_scale(self, stage: Stage, name: str, prefix: str, suffix: str) -> None:
        """Add a scale of the KV cache. Newer checkpoints have one for keys and one for values; the common one is then not needed."""
        stem = name.removesuffix(suffix)
        if suffix == "kv_cache_scaling_factor" and f"{stem}k_cache_scaling_factor" in stage[0].tensors:
            return
        for kind in "kv" if suffix[1] == "v" else suffix[0]:
            self._add(f"{prefix}self_attn.{kind}_proj.{kind}_scale", self._reader.shards(stage, name, suffix), "same")

    def _add_fused(self, shards: Shards, prefix: str, module: Module, ending: str, split: Split) -> None:
        """Add the parts of a fused module, or its rows in the order of Hugging Face."""
        rows, num_ranks = shards.info.shape[0], len(shards.stage) if split == "rows" else 1
        try:
            parts = row_parts(module, rows, self._config, num_ranks)
            order = row_order(module, parts, rows, self._config, num_ranks) if module.layout else None
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as problem:
            where = f"{shards.stage[0].files[0]}: {shards.name}"
            text = str(problem) if isinstance(problem, ValueError) else f"does not fit config.json: {problem}"
            raise CheckpointError(f"{where} {text}.", cure=DOWNLOAD_AGAIN) from problem
        if order is not None:
            finish = partial(_moved, order=order, then=module.finish if ending == ".weight" else None)
            self._add(f"{prefix}{module.parts[0]}{ending}", shards, split, finish=finish)
            return
        for name, part in zip(module.parts, parts, strict=True):
            self._add(f"{prefix}{name}{ending}", shards, split, partial(_rows, part=part))

    def _add_experts(self, stage: Stage, name: str, prefix: str, module: Module, suffix: str) -> None:
        """Add the tensors of each expert from a tensor [experts, …], or from one that all experts have in common.

        Ranks divide the experts, or the matrices of each, or both: rank r has those of its remainder, as TensorRT-LLM numbers them.
        """
        shape, count = stage[0].tensors[name].shape, self._num_experts
        is_common = suffix == "activation_scaling_factor" or len(shape) == 0 or (suffix == "prequant_scaling_factor" and shape[0] == 1)
        local = count if is_common else shape[0]
        divisions = count // local  # of the experts over ranks
        if local * divisions != count or self._tp % divisions:
            raise CheckpointError(
                f"{stage[0].files[0]}: {name} has {local} experts, and config.json describes {count}.", cure=DOWNLOAD_AGAIN
            )
        if module.is_stacked:
            self._stack(stage, name, prefix, module, suffix, count)
        for expert in range(count):
            first, index = divmod(expert, local)
            shards = self._reader.shards(stage[first::divisions], name, suffix, None if is_common else index)
            named = Module(tuple(part.format(expert) for part in module.parts), module.split, layout=module.layout)
            self._add_parts(shards, prefix, named, suffix)

    def _stack(self, stage: Stage, name: str, prefix: str, module: Module, suffix: str, count: int) -> None:
        """Note that Hugging Face has the weights of the `count` experts in one tensor. Raises CheckpointError for quantized ones."""
        if suffix != "weight" or not stage[0].tensors[name].dtype.is_floating_point or stage[0].tensors[name].dtype.itemsize == 1:
            raise CheckpointError(
                f"{stage[0].files[0]}: {name} is quantized, and experts of {self._config['architecture']} are read unquantized only.",
                cure=MIGRATION,
            )
        ending = SUFFIXES[suffix]
        self._experts[f"{prefix}{module.parts[0].replace('.{}', '')}.{ending}"] = [
            f"{prefix}{module.parts[0].format(expert)}.{ending}" for expert in range(count)
        ]

    def _add(
        self,
        new: str,
        shards: Shards,
        split: Split,
        select: Select = _all,
        *,
        finish: Finish = _unchanged,
        rows: int | None = None,
    ) -> None:
        """Add the tensor `new`, of which at most `rows` rows are used. Raises CheckpointError for shards that do not fit together."""
        if new in self._merged:
            raise CheckpointError(f"{shards.stage[-1].files[0]}: {shards.name} does not fit the other tensors.", cure=DOWNLOAD_AGAIN)
        parts = select([torch.empty(shards.info.shape, dtype=shards.info.dtype, device="meta") for _ in shards.stage])
        shape = list(parts[0].shape)
        if split != "same" and not shape:
            raise CheckpointError(f"{shards.stage[0].files[0]}: {shards.name} is one number, and not a matrix.", cure=DOWNLOAD_AGAIN)
        if split != "same":
            shape[0 if split == "rows" else -1] *= len(parts)
        try:
            shape = list(finish(torch.empty(shape, dtype=shards.info.dtype, device="meta")).shape)
        except (RuntimeError, IndexError) as problem:
            where = f"{shards.stage[0].files[0]}: {shards.name} {list(shards.info.shape)}"
            raise CheckpointError(f"{where} has another number of axes than its module.", cure=DOWNLOAD_AGAIN) from problem
        if split == "same" and shape == [1]:
            shape = []
        if rows is not None and shape and shape[0] > rows:
            shape[0] = rows
        self._merged[new] = _Merged(shards, TensorInfo(tuple(shape), shards.info.dtype), split, select, finish)

    def _check_vocabulary(self) -> None:
        """Raise CheckpointError when the checkpoint has no embedding."""
        if f"{self._family.outer['transformer.vocab_embedding']}.weight" not in self._merged:
            raise CheckpointError(f"{self._path} has no transformer.vocab_embedding.weight.", cure=DOWNLOAD_AGAIN)

    def _unknown(self, stage: Stage, name: str) -> CheckpointError:
        """The error for a tensor that is not known."""
        return CheckpointError(f"{stage[0].files[0]}: the tensor {name[:80]!r} is not known.", cure=MIGRATION)


def _rows(parts: list[Tensor], part: RowPart) -> list[Tensor]:
    """The rows of one part of a fused module."""
    return [tensor.narrow(0, part.start, part.length) for tensor in parts[:: part.step]]


def _moved(tensor: Tensor, order: Tensor, then: Finish | None) -> Tensor:
    """The rows in another order, and what `then` makes of them."""
    moved = _bytes(tensor).index_select(0, order.to(tensor.device)).view(tensor.dtype)
    return moved if then is None else then(moved)


def _minus(tensor: Tensor, offset: float) -> Tensor:
    """The tensor minus a number."""
    return tensor - offset


def _with_rows_before(tensor: Tensor, count: int) -> Tensor:
    """The matrix with `count` rows of zeros before it."""
    return torch.cat((tensor.new_zeros(count, tensor.shape[1]), tensor))


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor as bytes if its dtype cannot be concatenated (FP8); otherwise itself."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements."""
    return torch.equal(_bytes(one), _bytes(other))
