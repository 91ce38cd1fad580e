"""Loads the weights of heads from their checkpoint, without a build: tensors are combined, converted and quantized when they are loaded."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.distributed.group import SINGLE
from stoker.layers.loader import Loader
from stoker.models.architecture import TensorNames, Transformed
from stoker.quant.format import TensorSource
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.int8 import Int8
from stoker.quant.recipe import Recipe
from stoker.runtime.heads.folder import DOWNLOAD_AGAIN, HeadFolder


class HeadTensors(TensorSource):
    """The engine tensors that `names` makes of the tensors of a folder (see `TensorNames`)."""

    def __init__(self, folder: HeadFolder, names: TensorNames, config: ModelConfig, device: torch.device) -> None:
        self.folder, self.names, self.config, self.device = folder, names, config, device

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`, on the device. Raises CheckpointError unless its sources exist and make this shape."""
        entry, layer, suffix = self._look_up(name)
        sources = entry.sources if isinstance(entry, Transformed) else (entry,) if isinstance(entry, str) else entry
        files = [(source if source.endswith((".weight", ".bias")) else source + suffix).replace("{i}", layer) for source in sources]
        if any("{e}" in file for file in files):
            out = torch.empty(shape, dtype=dtype, device=self.device)
            for expert, part in enumerate(out):
                part.copy_(self._combine(name, entry, [file.replace("{e}", str(expert)) for file in files], tuple(part.shape), dtype))
            return out
        return self._combine(name, entry, files, shape, dtype).to(self.device)

    def _combine(
        self, name: str, entry: str | tuple[str, ...] | Transformed, files: list[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The tensor that the tensors `files` make. Raises CheckpointError if its shape is not `shape`."""
        tensors = [self.folder.read(file, dtype) for file in files]
        try:
            made = entry.transform(tensors, self.config) if isinstance(entry, Transformed) else torch.cat(tensors)
        except (RuntimeError, ValueError, IndexError):
            made = None
        if made is None or tuple(made.shape) != shape:
            found = ", ".join(f"{file} {list(tensor.shape)}" for file, tensor in zip(files, tensors, strict=True))
            raise CheckpointError(
                f"{self.folder.path}: {found} does not make {name} of shape {list(shape)}, which config.json implies.", cure=DOWNLOAD_AGAIN
            )
        return made.contiguous()

    def _look_up(self, name: str) -> tuple[str | tuple[str, ...] | Transformed, str, str]:
        """(entry of `names` for an engine tensor, its layer index or "", the suffix that the entry leaves out)."""
        match = re.match(r"layers\.(\d+)\.", name)
        for key in (name, f"layers.{{i}}.{name[match.end() :]}" if match else name):
            module, _, suffix = key.rpartition(".")
            for found, rest in ((key, ""), (module, f".{suffix}")):
                if found in self.names:
                    return self.names[found], match[1] if match else "", rest
        raise CheckpointError(f"{self.folder.path}: heads of this kind have no {name}.", cure="Heads of this variant are not supported.")


class HeadLoader(Loader):
    """Loads what the blocks of heads declare, on one rank.

    The linears of heads for a quantized engine are stored in int8: weights of 4 bits would need calibration, and every draft reads them.
    """

    def __init__(self, source: HeadTensors, dtype: torch.dtype, *, quantized: bool) -> None:
        super().__init__(source, Recipe(default=Int8() if quantized else Dense()), dtype, source.device, SINGLE)
        self.num_bytes = 0  # of the linears that were loaded, without biases

    def linear(self, spec: LinearSpec) -> Any:
        """Load and quantize the linear, or the stacked experts, that a spec declares. Raises CheckpointError for a wrong shape."""
        chosen = self.recipe.format_for(spec)
        stored = chosen.quantize(self.source.get(f"{spec.name}.weight", spec.weight_shape, self.dtype), spec)
        self.num_bytes += sum(tensor.nbytes for tensor in stored.values())
        bias = self.source.get(f"{spec.name}.bias", spec.bias_shape, self.dtype) if spec.bias else None
        return chosen.load(stored, bias)
