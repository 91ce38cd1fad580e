"""The tensors of a TensorRT-LLM checkpoint under the names of Hugging Face, with the shards of all ranks merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.tensorrt_llm.config import MIGRATION, rank_counts
from stoker.builder.checkpoint.tensorrt_llm.tensors import (
    LAYER_MODULES,
    NO_EFFECT,
    OUTER_MODULES,
    SUFFIXES,
    Module,
    Split,
    parse_layer_name,
    split_of,
)
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo

Stage = list[SafetensorsWeights]  # the files of one pipeline stage, by tensor-parallel rank


@dataclass(frozen=True, slots=True)
class _Merged:
    """A tensor of the Hugging Face checkpoint, made of one tensor of each rank of a stage."""

    stage: Stage
    name: str  # in the files of the ranks
    info: TensorInfo
    split: Split
    select: Callable[[list[Tensor]], list[Tensor]]  # the parts of each rank's tensor that belong to it


class TensorRTLLMWeights(CheckpointWeights):
    """The tensors of `rank*.safetensors`. `config` is the checkpoint's config.json, and `hugging_face` its equivalent.

    Raises CheckpointError for a missing file, a tensor that is not known, and shards that do not fit together.
    """

    def __init__(self, path: Path, config: dict[str, Any], hugging_face: dict[str, Any]) -> None:
        self._path, self._config, self._hugging_face = path, config, hugging_face
        self._tp, stages = rank_counts(config, str(path))
        self.files = [path / f"rank{rank}.safetensors" for rank in range(self._tp * stages)]
        if missing := [file for file in self.files if not file.is_file()]:
            raise CheckpointError(
                f"{missing[0]} is missing: config.json describes {len(self.files)} ranks.", cure="Copy the files of all ranks."
            )
        self._merged: dict[str, _Merged] = {}
        first_layer = 0
        for index in range(stages):
            stage = [SafetensorsWeights([file]) for file in self.files[index * self._tp : (index + 1) * self._tp]]
            first_layer += self._add_stage(stage, first_layer)
        if self._hugging_face["tie_word_embeddings"] and "lm_head.weight" not in self._merged:
            self._check_vocabulary()
        self.tensors = {name: merged.info for name, merged in self._merged.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield self.read(name).flatten()

    def read(self, name: str) -> Tensor:
        merged = self._merged[name]
        parts = merged.select([rank.read(merged.name) for rank in merged.stage])
        if merged.split == "same":
            if any(not _equal(parts[0], part) for part in parts[1:]):
                raise CheckpointError(
                    f"{self.location(name)} differs between ranks, which one weight cannot represent.",
                    cure=f"Convert the checkpoint with tp_size=1. {MIGRATION}",
                )
            return parts[0].reshape(merged.info.shape).contiguous()
        axis = 0 if merged.split == "rows" else -1
        joined = torch.cat([_bytes(part) for part in parts], axis).view(merged.info.dtype)
        return joined[: merged.info.shape[0]].contiguous()

    def location(self, name: str) -> str:
        merged = self._merged[name]
        return f"{merged.stage[0].files[0]}: {merged.name}"

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
        """Add the embedding, the final norm or the head, without the padding of the vocabulary."""
        module, _, suffix = name.rpartition(".")
        if module not in OUTER_MODULES or suffix not in SUFFIXES:
            raise self._unknown(stage, name)
        split: Split = "same"
        if module == "lm_head":
            split = "rows"
        elif module == "transformer.vocab_embedding" and self._embedding_is_split(stage, name):
            split = "rows" if self._config.get("embedding_sharding_dim", 0) == 0 else "columns"
        vocab = self._hugging_face.get("vocab_size")
        rows = vocab if module != "transformer.ln_f" and type(vocab) is int else None
        self._add(f"{OUTER_MODULES[module]}.{SUFFIXES[suffix]}", stage, name, split, lambda parts: parts, rows)

    def _embedding_is_split(self, stage: Stage, name: str) -> bool:
        """Whether ranks have parts of the embedding. use_parallel_embedding is ignored by some converters, so the shape decides."""
        shape = stage[0].tensors[name].shape
        return len(stage) > 1 and shape != (self._hugging_face.get("vocab_size"), self._hugging_face.get("hidden_size"))

    def _add_layer_tensor(self, stage: Stage, name: str, layer: int, module: str, suffix: str) -> None:
        """Add the tensors of a layer that one tensor of the ranks makes: three of a fused q, k and v."""
        prefix = f"model.layers.{layer}."
        if module == "attention" and suffix in ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor"):
            self._add_cache_scale(stage, name, prefix, suffix)
            return
        known = LAYER_MODULES.get(module)
        weight = stage[0].tensors.get(f"{name.removesuffix(suffix)}weight")
        if suffix == "per_channel_scale" and weight is not None and weight.dtype == torch.int8:
            raise CheckpointError(
                f"{stage[0].files[0]}: {name.removesuffix(suffix)}weight (W8A16 or W4A16) has the order of values of one kind of GPU, "
                "which the checkpoint does not name.",
                cure="Build from the Hugging Face checkpoint with --quantize WEIGHTS_ONLY_INT8 or WEIGHTS_ONLY_INT4.",
            )
        if known is None or suffix not in SUFFIXES:
            raise self._unknown(stage, name)
        if "num_local_experts" in self._hugging_face and module in ("mlp.fc", "mlp.proj"):
            self._add_experts(stage, name, prefix, module, suffix)
            return
        split = split_of(known, suffix, stage[0].tensors[name].shape)
        if split == "same" or len(known.parts) == 1:
            for part in known.parts:
                self._add(f"{prefix}{part}.{SUFFIXES[suffix]}", stage, name, split, lambda parts: parts)
            return
        self._add_fused(stage, name, prefix, known, SUFFIXES[suffix])

    def _add_cache_scale(self, stage: Stage, name: str, prefix: str, suffix: str) -> None:
        """Add a scale of the KV cache. Newer checkpoints have one for keys and one for values; the common one is then not needed."""
        stem = name.removesuffix(suffix)
        if suffix == "kv_cache_scaling_factor" and f"{stem}k_cache_scaling_factor" in stage[0].tensors:
            return
        for kind in "kv" if suffix[1] == "v" else suffix[0]:
            self._add(f"{prefix}self_attn.{kind}_proj.{kind}_scale", stage, name, "same", lambda parts: parts)

    def _add_fused(self, stage: Stage, name: str, prefix: str, module: Module, suffix: str) -> None:
        """Add q, k and v. With fewer key-value heads than ranks, neighbouring ranks have copies of the same head."""
        heads, kv_heads = (self._hugging_face.get(key, 0) for key in ("num_attention_heads", "num_key_value_heads"))
        kv_heads = kv_heads or heads
        copies = max(1, self._tp // max(kv_heads, 1))
        local = (heads // self._tp, kv_heads * copies // self._tp)
        rows, units = stage[0].tensors[name].shape[0], local[0] + 2 * local[1]
        if units < 3 or rows % units or heads % self._tp or (kv_heads * copies) % self._tp:
            raise CheckpointError(f"{stage[0].files[0]}: {name} has {rows} rows, which are not {heads} heads.", cure=DOWNLOAD_AGAIN)
        start = 0
        for index, part in enumerate(module.parts):
            length = rows // units * local[min(index, 1)]
            step = copies if index else 1

            def select(parts: list[Tensor], start: int = start, length: int = length, step: int = step) -> list[Tensor]:
                """The rows of one part, of each rank that has other heads than its predecessor."""
                return [part.narrow(0, start, length) for part in parts[::step]]

            self._add(f"{prefix}{part}.{suffix}", stage, name, "rows", select)
            start += length

    def _add_experts(self, stage: Stage, name: str, prefix: str, module: str, suffix: str) -> None:
        """Add the matrices of each expert: `fc` [experts, up and gate rows, in], `proj` [experts, out, in]."""
        shape = stage[0].tensors[name].shape
        if suffix != "weight" or len(shape) != 3 or "quantization_config" in self._hugging_face:
            raise CheckpointError(f"{stage[0].files[0]}: {name}: quantized experts of TensorRT-LLM are not supported.", cure=MIGRATION)
        if shape[0] != (count := self._hugging_face["num_local_experts"]):
            raise CheckpointError(
                f"{stage[0].files[0]}: {name} has {shape[0]} experts, and config.json describes {count}.", cure=DOWNLOAD_AGAIN
            )
        half = shape[1] // 2
        matrices = {"w3": (0, half), "w1": (half, half)} if module == "mlp.fc" else {"w2": (0, shape[1])}
        for expert in range(shape[0]):
            for matrix, (start, length) in matrices.items():

                def select(parts: list[Tensor], expert: int = expert, start: int = start, length: int = length) -> list[Tensor]:
                    """The rows of one matrix of an expert, of each rank."""
                    return [part[expert].narrow(0, start, length) for part in parts]

                self._add(
                    f"{prefix}block_sparse_moe.experts.{expert}.{matrix}.weight",
                    stage,
                    name,
                    "rows" if module == "mlp.fc" else "columns",
                    select,
                )

    def _add(
        self, new: str, stage: Stage, name: str, split: Split, select: Callable[[list[Tensor]], list[Tensor]], rows: int | None = None
    ) -> None:
        """Add the tensor `new`, of which at most `rows` rows are used. Raises CheckpointError for shards that do not fit together."""
        infos = [rank.tensors[name] for rank in stage]
        if new in self._merged or any(info != infos[0] for info in infos):
            raise CheckpointError(f"{stage[-1].files[0]}: {name} does not fit the other ranks or tensors.", cure=DOWNLOAD_AGAIN)
        parts = select([torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos])
        shape = list(parts[0].shape)
        if split != "same" and not shape:
            raise CheckpointError(f"{stage[0].files[0]}: {name} is one number, and not a matrix.", cure=DOWNLOAD_AGAIN)
        if split != "same":
            shape[0 if split == "rows" else -1] *= len(parts)
        elif shape == [1]:
            shape = []
        if rows is not None and shape and shape[0] > rows:
            shape[0] = rows
        self._merged[new] = _Merged(stage, name, TensorInfo(tuple(shape), infos[0].dtype), split, select)

    def _check_vocabulary(self) -> None:
        """Raise CheckpointError when the checkpoint has no embedding."""
        if "model.embed_tokens.weight" not in self._merged:
            raise CheckpointError(f"{self._path} has no transformer.vocab_embedding.weight.", cure=DOWNLOAD_AGAIN)

    def _unknown(self, stage: Stage, name: str) -> CheckpointError:
        """The error for a tensor that is not known."""
        return CheckpointError(f"{stage[0].files[0]}: the tensor {name[:80]!r} is not known.", cure=MIGRATION)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor as bytes if its dtype cannot be concatenated (FP8); otherwise itself."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements."""
    return torch.equal(_bytes(one), _bytes(other))
