"""Writes an engine as a Hugging Face checkpoint, whose quantized weights are in the format of compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stoker.base.errors import ConfigError, EngineError
from stoker.base.logging import get_logger
from stoker.builder.conversion.layouts import stored_layouts
from stoker.builder.conversion.tensor_plan import TensorPlan, plans_of
from stoker.builder.export.compressed import module_tensors, scheme_of
from stoker.builder.prequantized.dequantize import dequantize
from stoker.core.specs import LinearSpec, Spec
from stoker.engine.publish import workspace
from stoker.engine.reader import HUGGING_FACE_CONFIG_FILE, Engine
from stoker.engine.tensor_source import FileTensorSource
from stoker.layers.decoder import declare
from stoker.models import get_architecture
from stoker.models.architecture import TensorNames
from stoker.models.config_reader import read_model_config
from stoker.quant.formats.dense import Dense

FILE_BYTES = 4 << 30  # of one weight file, about
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_REBUILD = "Build an engine of one rank from the checkpoint with this version of Stoker."

log = get_logger(__name__)


def export_hugging_face(path: Path, out: Path) -> list[Path]:
    """Write the engine in `path` as a checkpoint in the new directory `out`. Returns its files.

    Raises EngineError for an engine that a checkpoint cannot represent, and ConfigError when `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists.", cure="Name a new directory.")
    engine = Engine.open(path)
    config = _checked_config(engine)
    with workspace(out) as work:
        exported = _Exported(engine, work)
        exported.write()
        quantization = exported.quantization_config()
        config |= {"quantization_config": quantization} if quantization else {}
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in _COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, work / name)
        work.rename(out)
    return sorted(out.iterdir())


def _checked_config(engine: Engine) -> dict[str, Any]:
    """The config.json of the checkpoint. Raises EngineError unless it describes the engine."""
    file = engine.path / HUGGING_FACE_CONFIG_FILE
    if engine.world_size > 1 or engine.config.weights != "files" or not file.is_file():
        what = f"has {engine.world_size} ranks" if engine.world_size > 1 else f"has no weights or no {HUGGING_FACE_CONFIG_FILE}"
        raise EngineError(f"{engine.path} {what}, and cannot be exported.", cure=_REBUILD)
    config: dict[str, Any] = json.loads(file.read_bytes())
    model = engine.config.model
    config["tie_word_embeddings"] = model.tie_head
    config["dtype"] = engine.config.dtype
    config.pop("torch_dtype", None)
    if "text_config" in config:
        raise EngineError(f"{engine.path} is the text model of a multimodal checkpoint.", cure="Export a text-only model.")
    if read_model_config(get_architecture(model.architecture), config, ("*",)) != model:
        raise EngineError(
            f"{engine.path} differs from the config.json of its checkpoint, for example in its rotary settings.",
            cure="Build it without settings that change the model.",
        )
    return config


class _Exported:
    """The weight files of the checkpoint, and which modules have which format."""

    def __init__(self, engine: Engine, work: Path) -> None:
        self.engine, self.work = engine, work
        self.architecture = get_architecture(engine.config.model.architecture)
        self.schemes: dict[str, dict[str, Any] | None] = {}  # of the linears by module name; None: plain numbers
        self._files: list[tuple[Path, list[str]]] = []
        self._num_bytes = 0

    def write(self) -> None:
        """Write the weight files, and an index if there are several."""
        names, pending, size = self.architecture.tensor_names(self.engine.config.model), {}, 0
        source = FileTensorSource(self.engine.path / "rank0.safetensors", torch.device("cpu"))
        for spec in declare(self.engine.config.model).values():
            for name, tensor in self._tensors(spec, names, source):
                pending[name] = tensor.contiguous()
                size += tensor.numel() * tensor.itemsize
            if size > FILE_BYTES:
                self._write_file(pending)
                pending, size = {}, 0
        self._write_file(pending)
        self._name_files()

    def quantization_config(self) -> dict[str, Any] | None:
        """The settings of compressed-tensors; None if no module is quantized. The most frequent scheme is that of all other linears."""
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for module, scheme in self.schemes.items():
            if scheme is not None:
                groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(module)
        if not groups:
            return None
        ordered = sorted(groups.values(), key=lambda group: -len(group[1]))
        forms = {scheme["format"] for scheme, _ in ordered}
        plain = {module for module, scheme in self.schemes.items() if scheme is None}
        model = self.engine.config.model
        if model.tie_head:  # no weight of the checkpoint, but a linear of the model
            head = self.architecture.tensor_names(model).get("head")
            plain.add(head if isinstance(head, str) else "lm_head")
        return {
            "quant_method": "compressed-tensors",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": scheme | {"targets": ["Linear"] if i == 0 else modules} for i, (scheme, modules) in enumerate(ordered)
            },
            "ignore": sorted(plain),
            "kv_cache_scheme": None,
        }

    def _tensors(self, spec: Spec, names: TensorNames, source: FileTensorSource) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of everything that a spec stores."""
        recipe, dtype = self.engine.config.recipe, self.engine.dtype
        layouts = stored_layouts(spec, recipe, dtype)
        stored = {name: source.get(name, layout.shape, layout.dtype) for name, layout in layouts.items()}
        for plan in plans_of(spec, names):
            if plan.transformed is not None:
                raise EngineError(
                    f"{self.engine.path}: {plan.name} is computed from tensors of {self.architecture.name}, and cannot be exported.",
                    cure="Use the checkpoint that the engine was built from.",
                )
            if isinstance(spec, LinearSpec) and plan.name.endswith(".weight"):
                yield from self._linear(spec, plan, stored)
            else:
                yield from _plain(plan, stored[plan.name])

    def _linear(self, spec: LinearSpec, plan: TensorPlan, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the modules that make a linear."""
        chosen, prefix = self.engine.config.recipe.format_for(spec), f"{spec.name}."
        if spec.num_experts and not isinstance(chosen, Dense):
            raise EngineError(
                f"{self.engine.path}: transformers does not read quantized experts ({spec.name}).", cure="Build with --quantize NO_QUANT."
            )
        if spec.num_experts:
            yield from _plain(plan, stored[plan.name])
            return
        layouts = chosen.layout(spec, self.engine.dtype)
        is_embedding, start = spec.name == "embed", 0
        parts = spec.parts if len(plan.sources[0]) > 1 else (spec.out_features,)
        for name, rows in zip(plan.sources[0], parts, strict=True):
            module = name.removesuffix(".weight")
            part = {}
            for suffix, layout in layouts.items():
                tensor = stored[prefix + suffix]
                part[suffix] = (
                    tensor
                    if layout.row_axis is None
                    else tensor.narrow(layout.row_axis, start // layout.row_unit, -(-rows // layout.row_unit))
                )
            start += rows
            if is_embedding and not isinstance(chosen, Dense):
                yield name, dequantize(chosen, part).to(self.engine.dtype)  # compressed-tensors quantizes linears only
                continue
            if not is_embedding:
                self.schemes[module] = scheme_of(chosen, part)
                if self.schemes[module] is None and not isinstance(chosen, Dense):
                    log.warning("%s is exported as %s: compressed-tensors has no format for it.", module, self.engine.config.dtype)
            yield from ((f"{module}.{suffix}", tensor) for suffix, tensor in module_tensors(chosen, part, self.engine.dtype).items())

    def _write_file(self, tensors: dict[str, Tensor]) -> None:
        """Write one weight file under a temporary name."""
        file = self.work / f"part-{len(self._files)}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        self._files.append((file, list(tensors)))
        self._num_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())

    def _name_files(self) -> None:
        """Rename the weight files as transformers names them, and write the index of several."""
        if len(self._files) == 1:
            self._files[0][0].rename(self.work / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, (file, names) in enumerate(self._files):
            new = f"model-{i + 1:05}-of-{len(self._files):05}.safetensors"
            file.rename(self.work / new)
            weight_map |= dict.fromkeys(names, new)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self.work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plain(plan: TensorPlan, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of an engine tensor that is not quantized: its experts, and the parts of each."""
    for matrix, sources in zip(tensor if plan.stacked else (tensor,), plan.sources, strict=True):
        yield from zip(sources, matrix.split(plan.parts) if len(sources) > 1 else (matrix,), strict=True)
