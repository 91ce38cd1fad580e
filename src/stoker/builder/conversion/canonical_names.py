"""The tensors of a checkpoint under canonical names: older names are renamed, and pre-quantized tensors appear as one weight each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.single_experts import SingleExperts
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.cache_scales import CacheScales
from stoker.builder.prequantized.dequantize import dequantize
from stoker.builder.prequantized.methods import read_quantized
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight
from stoker.models import Architecture


class CanonicalWeights(CheckpointWeights):
    """The tensors of `inner` with the canonical names of `architecture`.

    `quantization` is the quantization_config of config.json, if any. A weight of a pre-quantized checkpoint appears once, under the name of
    the plain weight: as a float32 tensor in `tensors`, and, where a format can hold it without a change, in `prequantized`. Scales of the
    KV cache are in `cache_scales` instead. `quantized_sources` are the tensors of the checkpoint that make each quantized weight.
    """

    def __init__(self, inner: CheckpointWeights, architecture: Architecture, quantization: dict[str, Any] | None = None) -> None:
        if architecture.stacks_experts:
            inner = SingleExperts(inner)
        self.inner = inner
        self.files = inner.files
        canonical = architecture.canonical_name
        quantized = read_quantized(inner, quantization) if isinstance(quantization, dict) else {}
        unchanged = {name: weight for name, weight in quantized.items() if isinstance(weight, PrequantizedWeight)}
        dequantized = {name: _dequantized(weight) for name, weight in quantized.items()}
        self._prequantized = {canonical(name): weight for name, weight in unchanged.items()}
        self._dequantized = {canonical(name): weight for name, weight in dequantized.items()}
        self.cache_scales = CacheScales(inner.tensors if isinstance(quantization, dict) else {})
        algorithm = quantization.get("kv_cache_quant_algo") if isinstance(quantization, dict) else None
        self.has_cache_scales = bool(self.cache_scales.sources) and algorithm in (None, "FP8")
        self.quantized_sources = {canonical(name): weight.sources for name, weight in dequantized.items()}
        self._factors = {canonical(name): weight.input_factors for name, weight in unchanged.items() if weight.input_factors}
        self.input_factors = self._factors
        packed = {source for weight in dequantized.values() for source in weight.sources} | {*self.cache_scales.sources.values()}
        plain = [name for name in inner.tensors if name not in packed]
        self._plain = {canonical(name): name for name in plain}
        if len(self._plain) < len(plain):
            duplicate = next(name for name in plain if self._plain[canonical(name)] != name)
            raise CheckpointError(f"{inner.location(duplicate)} exists twice, in two spellings.", cure="Remove one of them.")
        self.tensors = {name: inner.tensors[raw] for name, raw in self._plain.items()}
        self.tensors |= {name: weight.info for name, weight in self._dequantized.items()}
        self.prequantized = {name: inner.prequantized[raw] for name, raw in self._plain.items() if raw in inner.prequantized}
        self.prequantized |= {name: weight.format for name, weight in self._prequantized.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The values of the tensor in parts. A dequantized tensor is one part."""
        if name in self._dequantized:
            yield self.read(name).flatten()
        else:
            yield from self.inner.chunks(self._plain[name])

    def copy_into(self, name: str, out: Tensor) -> Iterator[Tensor]:
        if name in self._dequantized:
            yield from super().copy_into(name, out)
        else:
            yield from self.inner.copy_into(self._plain[name], out)

    def read(self, name: str) -> Tensor:
        """The tensor with this canonical name, dequantized if the checkpoint stores it quantized."""
        if name not in self._dequantized:
            return self.inner.read(self._plain[name])
        weight = self._dequantized[name]
        return weight.dequantize([self.inner.read(source) for source in weight.sources])

    def read_prequantized(self, name: str) -> dict[str, Tensor]:
        """The tensors of an engine format, repacked from those of the checkpoint's quantization."""
        if name not in self._prequantized:
            return self.inner.read_prequantized(self._plain[name])
        weight = self._prequantized[name]
        return weight.repack([self.inner.read(source) for source in weight.sources])

    def read_input_factors(self, name: str) -> Tensor:
        """The factors by which the input of a pre-quantized weight is multiplied, float32 [in]."""
        return self.inner.read(self._factors[name]).float()

    def location(self, name: str) -> str:
        """Where the tensor is stored in the checkpoint, for messages."""
        return self.inner.location(self._dequantized[name].sources[0] if name in self._dequantized else self._plain[name])


def _dequantized(weight: PrequantizedWeight | DequantizedWeight) -> DequantizedWeight:
    """The weight in plain numbers. One that a format can hold is float32, for builds that store it in another format."""
    if isinstance(weight, DequantizedWeight):
        return weight
    info = TensorInfo(weight.shape, torch.float32)

    def widen(tensors: list[Tensor]) -> Tensor:
        """The plain weight from the tensors of `weight.sources`."""
        plain = dequantize(weight.format, weight.repack(tensors[: len(weight.sources)]))
        plain = plain * tensors[-1].float() if weight.input_factors else plain
        return plain.transpose(-1, -2) if weight.is_transposed else plain

    factors = (weight.input_factors,) if weight.input_factors else ()
    return DequantizedWeight((*weight.sources, *factors), info, widen)
