"""Writes an engine as a Hugging Face checkpoint, whose quantized weights are in the format of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError, EngineError
from stoker.base.logging import get_logger
from stoker.builder.conversion.import_linear import SHARED_SUFFIXES
from stoker.builder.conversion.tensor_plan import TensorPlan, plans_of
from stoker.builder.export.cache_scales import KV_CACHE, KV_CACHE_SCHEME, plain_cache_scales
from stoker.builder.export.compressed import expert_module, module_tensors, scheme_of
from stoker.builder.export.merged_ranks import MergedRanks
from stoker.builder.export.weight_files import WeightFiles
from stoker.builder.prequantized.dequantize import dequantize
from stoker.core.model_config import AttentionConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.engine.publish import workspace
from stoker.engine.reader import HUGGING_FACE_CONFIG_FILE, Engine
from stoker.layers.decoder import declare, kv_cache_specs
from stoker.models import Architecture, get_architecture, resolve_architecture
from stoker.models.architectures.qwen_vl import VISION_KEYS, text_data
from stoker.models.config_reader import read_model_config
from stoker.quant.format import Format
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp8 import Fp8

_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
# Text models that transformers knows only inside of a multimodal model, and the model with the same weights and, for text, the same logits.
_TEXT_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},  # Qwen3-VL has no such setting
}
_EXPERTS = r"re:.*\.experts\.\d+\..*"  # the target from which transformers takes the settings of experts
_REBUILD = "Build an engine from the checkpoint with this version of Stoker."

log = get_logger(__name__)


def export_hugging_face(path: Path, out: Path) -> list[Path]:
    """Write the engine in `path` as a checkpoint in the new directory `out`. Returns its files.

    Raises EngineError for an engine that a checkpoint cannot represent, and ConfigError when `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists.", cure="Name a new directory.")
    engine = Engine.open(path)
    row, config = _checked_config(engine)
    with workspace(out) as work:
        exported = _Exported(engine, row, work)
        exported.write()
        quantization = exported.quantization_config()
        config |= {"quantization_config": quantization} if quantization else {}
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in _COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, work / name)
        work.rename(out)
    return sorted(out.iterdir())


def _checked_config(engine: Engine) -> tuple[Architecture, dict[str, Any]]:
    """The architecture and the config.json of the checkpoint. Raises EngineError unless they describe the engine.

    The language model of a multimodal checkpoint gets the architecture of its text_config.
    """
    file = engine.path / HUGGING_FACE_CONFIG_FILE
    if engine.config.weights != "files" or not file.is_file():
        raise EngineError(f"{engine.path} has no weights or no {HUGGING_FACE_CONFIG_FILE}, and cannot be exported.", cure=_REBUILD)
    config: dict[str, Any] = json.loads(file.read_bytes())
    model = engine.config.model
    row = get_architecture(model.architecture)
    if "text_config" in config:
        row, config = _text_model(engine, config)
        model = msgspec.structs.replace(model, architecture=row.name)
    config["dtype"] = engine.config.dtype
    config.pop("torch_dtype", None)
    if read_model_config(row, config, ("*",)).tie_head != model.tie_head:
        config["tie_word_embeddings"] = model.tie_head
    if read_model_config(row, config, ("*",)) != model:
        raise EngineError(
            f"{engine.path} differs from the config.json of its checkpoint, for example in its rotary settings.",
            cure="Build it without settings that change the model.",
        )
    return row, config


def _text_model(engine: Engine, config: dict[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """The architecture and the config.json of the language model alone. Raises EngineError if it has no architecture of its own."""
    text: dict[str, Any] = config["text_config"]
    if text.get("model_type") in _TEXT_MODELS:
        text = _without_mrope(config) | _TEXT_MODELS[text["model_type"]]
    try:
        row = resolve_architecture({"model_type": text.get("model_type")})
    except CheckpointError as error:
        raise EngineError(
            f"{engine.path} is the language model of {engine.config.model.architecture}, whose model_type {text.get('model_type')!r} is no "
            "architecture of its own.",
            cure="Use the checkpoint that the engine was built from.",
        ) from error
    return row, text | {"architectures": [row.name]}


def _without_mrope(config: dict[str, Any]) -> dict[str, Any]:
    """The text_config of a Qwen VL model without the settings of image positions, which do not change the positions of text."""
    text = text_data(config)
    for key in ("rope_scaling", "rope_parameters"):
        if text.get(key):
            text[key] = {name: value for name, value in text[key].items() if name not in VISION_KEYS} or None
    return {name: value for name, value in text.items() if name not in VISION_KEYS}


class _Exported:
    """The weight files of the checkpoint, and which modules have which format."""

    def __init__(self, engine: Engine, architecture: Architecture, work: Path) -> None:
        self.engine = engine
        self.architecture = architecture
        self.schemes: dict[str, dict[str, Any] | None] = {}  # of the linears by module name; None: plain numbers
        self.has_cache_scales = False
        self._experts: set[str] = set()  # the modules of `schemes` that are linears of experts
        self._num_dequantized = 0  # of them, those that are plain numbers in the checkpoint only
        self._names = self.architecture.tensor_names(engine.config.model)
        self._specs = declare(engine.config.model)
        self._ranks = MergedRanks(engine)
        self._files = WeightFiles(work)

    def write(self) -> None:
        """Write the weight files."""
        for spec in self._specs.values():
            for name, tensor in self._tensors(spec):
                self._files.add(name, tensor)
        if self.engine.config.recipe.kv_cache is not None and not self.architecture.plain_export:
            self._write_cache_scales()
        self._files.finish()
        if self._num_dequantized:
            log.warning(
                "%d linears of experts are exported as %s: transformers reads no experts in their format.",
                self._num_dequantized,
                self.engine.config.dtype,
            )
        if self.architecture.plain_export and any(self._stores_quantized(spec) for spec in self._specs.values()):
            log.warning(
                "The checkpoint has plain numbers only: transformers reads a quantized %s with experts of another kind.",
                self.architecture.name,
            )

    def quantization_config(self) -> dict[str, Any] | None:
        """The settings of compressed-tensors; None if nothing is quantized. The most frequent scheme is that of all other linears."""
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for module, scheme in self.schemes.items():
            if scheme is not None:
                groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(module)
        if not groups and not self.has_cache_scales:
            return None
        # The first group is that of most modules, without experts: transformers reads those of experts from the group of their pattern.
        ordered = sorted(groups.values(), key=lambda group: (-len({*group[1]} - self._experts), -len(group[1])))
        forms = {scheme["format"] for scheme, _ in ordered}
        plain = {module for module, scheme in self.schemes.items() if scheme is None}
        model = self.engine.config.model
        if model.tie_head:  # no weight of the checkpoint, but a linear of the model
            head = self._names.get("head")
            plain.add(head if isinstance(head, str) else "lm_head")
        config_groups = {
            f"group_{i}": scheme | {"targets": ["Linear"] if i == 0 else self._targets(modules)}
            for i, (scheme, modules) in enumerate(ordered)
        }
        if self._experts & plain == self._experts != set():
            # transformers passes plain experts on only if their group is FP8. Other readers ignore them, as `ignore` says.
            config_groups["experts"] = (scheme_of(Fp8(activations="none"), {}) or {}) | {"targets": [_EXPERTS]}
        return {
            "quant_method": "compressed-tensors",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision" if forms else "dense",
            "quantization_status": "compressed",
            "config_groups": config_groups,
            "ignore": sorted(plain),
            "kv_cache_scheme": KV_CACHE_SCHEME if self.has_cache_scales else None,
        }

    def _targets(self, modules: list[str]) -> list[str]:
        """The targets of a group: its modules, of which all experts are one pattern."""
        others = [module for module in modules if module not in self._experts]
        quantized = {module for module in self._experts if self.schemes[module] is not None}
        return [_EXPERTS, *others] if quantized and quantized <= set(modules) else modules

    def _stores_quantized(self, spec: Spec) -> bool:
        """Whether the engine stores a spec in a format other than plain numbers."""
        return isinstance(spec, LinearSpec) and not isinstance(self.engine.config.recipe.format_for(spec), Dense)

    def _tensors(self, spec: Spec) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of everything that a spec stores."""
        stored = self._ranks.tensors_of(spec)
        for plan in plans_of(spec, self._names):
            if plan.transformed is not None:
                yield from self._restored(spec, plan, stored)
            elif isinstance(spec, LinearSpec) and plan.name.endswith(".weight"):
                yield from self._linear(spec, plan, stored)
            else:
                yield from self._plain(plan, stored[plan.name])

    def _restored(self, spec: Spec, plan: TensorPlan, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of tensors that the engine has in another arrangement. Quantized ones become plain numbers.

        Raises EngineError for those that cannot be computed from engine tensors.
        """
        transformed = plan.transformed
        assert transformed is not None
        if transformed.restore is None and plan.partners:
            return  # the partner with a `restore` yields all sources
        if transformed.restore is None or plan.stacked:
            raise EngineError(
                f"{self.engine.path}: {plan.name} is computed from tensors of {self.architecture.name}, and cannot be exported.",
                cure="Use the checkpoint that the engine was built from.",
            )
        tensors = [self._dequantized(spec, plan.name, stored)]
        for partner in plan.partners:
            of_partner = self._specs[partner if partner in self._specs else partner.rpartition(".")[0]]
            tensors.append(self._dequantized(of_partner, partner, self._ranks.tensors_of(of_partner)))
        for name, tensor in zip(plan.sources[0], transformed.restore(tensors, self.engine.config.model), strict=True):
            if name.endswith(".weight") and tensor.dim() == 2:
                self.schemes[name.removesuffix(".weight")] = None
            yield name, tensor.to(self.engine.dtype)

    def _dequantized(self, spec: Spec, name: str, stored: dict[str, Tensor]) -> Tensor:
        """The engine tensor `name` of a spec as plain numbers. Logs a warning if the engine has it quantized."""
        if not (isinstance(spec, LinearSpec) and name.endswith(".weight") and self._stores_quantized(spec)):
            return stored[name]
        log.warning("%s is exported as %s: the engine has it in another arrangement.", name, self.engine.config.dtype)
        return dequantize(self.engine.config.recipe.format_for(spec), self._by_suffix(spec, stored))

    def _by_suffix(self, spec: LinearSpec, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stored tensors of the weight of a linear, by suffix."""
        layouts = self.engine.config.recipe.format_for(spec).layout(spec, self.engine.dtype)
        return {suffix: stored[f"{spec.name}.{suffix}"] for suffix in layouts}

    def _linear(self, spec: LinearSpec, plan: TensorPlan, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the modules that make a linear, of each expert if it has several."""
        chosen = self.engine.config.recipe.format_for(spec)
        plain_modules = dict.fromkeys(name.removesuffix(".weight") for group in plan.sources for name in group)
        if not self._stores_quantized(spec):
            if spec.name != "embed" and (plan.stacked or not spec.num_experts):
                self.schemes |= plain_modules
                self._experts |= plain_modules.keys() if plan.stacked else set()
            yield from self._plain(plan, stored[plan.name])
            return
        tensors = self._by_suffix(spec, stored)
        if spec.name == "embed" or (spec.num_experts and not plan.stacked):  # compressed-tensors quantizes linears only
            if spec.num_experts:
                log.warning("%s is exported as %s: the checkpoint has one tensor of all experts.", spec.name, self.engine.config.dtype)
            yield from self._plain(plan, dequantize(chosen, tensors).to(self.engine.dtype))
            return
        if self.architecture.plain_export:
            self.schemes |= plain_modules
            yield from self._plain(plan, dequantize(chosen, tensors).to(self.engine.dtype))
            return
        for index, names in enumerate(plan.sources):
            of_expert = {suffix: t[index] if plan.stacked and suffix not in SHARED_SUFFIXES else t for suffix, t in tensors.items()}
            yield from self._modules(spec, dict(zip(names, self._rows_of(plan), strict=True)), chosen, of_expert)

    def _rows_of(self, plan: TensorPlan) -> tuple[int, ...]:
        """The rows of each source of an engine tensor, which follow one after the other. Raises EngineError if they are unknown."""
        count, num_rows = len(plan.sources[0]), plan.shape[int(plan.stacked)]
        if count == len(plan.parts):
            return plan.parts
        module = re.sub(r"^layers\.\d+\.", "layers.{i}.", plan.name).rpartition(".")[0]
        if count > 1 and module in self.architecture.source_parts:
            parts = iter(plan.parts)
            return tuple(sum(islice(parts, number)) for number in self.architecture.source_parts[module])
        if count == 1 or not plan.parts:  # norms of single heads are equally long
            return (num_rows // count,) * count
        raise EngineError(
            f"{self.engine.path}: {plan.name} has {len(plan.parts)} parts, which are {count} tensors of {self.architecture.name}, "
            "and cannot be exported.",
            cure="Use the checkpoint that the engine was built from.",
        )

    def _modules(
        self, spec: LinearSpec, modules: dict[str, int], chosen: Format, tensors: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of modules, by name their rows of a weight [out, in], which follow one after the other."""
        layouts = chosen.layout(msgspec.structs.replace(spec, num_experts=0), self.engine.dtype)
        start = 0
        for name, rows in modules.items():
            module, part = name.removesuffix(".weight"), {}
            for suffix, layout in layouts.items():
                unit, axis = layout.row_unit, layout.row_axis
                part[suffix] = tensors[suffix] if axis is None else tensors[suffix].narrow(axis, start // unit, -(-rows // unit))
            start += rows
            if spec.num_experts:
                self._experts.add(module)
                self.schemes[module], exported = expert_module(chosen, part, self.engine.dtype)
                self._num_dequantized += self.schemes[module] is None
            else:
                self.schemes[module], exported = scheme_of(chosen, part), module_tensors(chosen, part, self.engine.dtype)
            if self.schemes[module] is None and module not in self._experts:
                log.warning("%s is exported as %s: compressed-tensors has no format for it.", module, self.engine.config.dtype)
            yield from ((f"{module}.{suffix}", tensor) for suffix, tensor in exported.items())

    def _plain(self, plan: TensorPlan, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of an engine tensor that is not quantized: its experts, and the parts of each."""
        for matrix, sources in zip(tensor if plan.stacked else (tensor,), plan.sources, strict=True):
            yield from zip(sources, matrix.split(self._rows_of(plan)) if len(sources) > 1 else (matrix,), strict=True)

    def _write_cache_scales(self) -> None:
        """Write the scales of an FP8 cache. Logs a warning for another cache, whose scales other tools do not have."""
        model, kv_cache = self.engine.config.model, self.engine.config.recipe.kv_cache
        if kv_cache != KV_CACHE or not all(isinstance(layer.attention, AttentionConfig) for layer in model.layers):
            log.warning(
                "The scales of the %s KV cache are not exported: they differ by head, or the cache has no keys and values.", kv_cache
            )
            return
        for index in range(model.num_layers):
            specs = kv_cache_specs(model, index, kv_cache)
            stored = {key: self._ranks.tensors_of(spec)[spec.name] for key, spec in specs.items()}
            qkv = self._specs[f"layers.{index}.attention.qkv"]
            first = plans_of(qkv, self._names)[0].sources[0][0]
            for name, scale in plain_cache_scales(stored).items():
                self._files.add(f"{first.removesuffix('.weight').rpartition('.')[0]}.{name}", scale)
        self.has_cache_scales = True
