"""A checkpoint's tensors as the architecture knows them: older spellings renamed, packed ones restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import Stored, Weights
from stoker.builder.prequantized.import_weights import dequantize
from stoker.builder.prequantized.methods import Packed, find_kept, find_packed
from stoker.builder.prequantized.weight import Kept
from stoker.models import Architecture


class LogicalWeights(Weights):
    """`inner` under the names of `architecture`. `quantization` is config.json's quantization_config, if it has one."""

    def __init__(self, inner: Weights, architecture: Architecture, quantization: dict[str, Any] | None = None) -> None:
        self.inner = inner
        self.files = inner.files
        taken = find_kept(inner.stored, quantization) if isinstance(quantization, dict) else {}
        self._taken = {architecture.canonical_name(name): kept for name, kept in (taken or {}).items()}
        restored = {name: _restored(kept) for name, kept in (taken or {}).items()}
        packed = find_packed(inner.stored, quantization or {}) if taken is None else restored
        consumed = {source for tensor in packed.values() for source in tensor.sources}
        self._packed = {architecture.canonical_name(name): tensor for name, tensor in packed.items()}
        plain = [name for name in inner.stored if name not in consumed]
        self._names = {architecture.canonical_name(name): name for name in plain}
        if len(self._names) < len(plain):
            twice = next(name for name in plain if self._names[architecture.canonical_name(name)] != name)
            raise CheckpointError(f"{inner.locate(twice)} is there twice, under two spellings.", cure="Remove one of them.")
        self.stored = {name: inner.stored[raw] for name, raw in self._names.items()}
        self.stored |= {name: tensor.stored for name, tensor in self._packed.items()}
        self.kept = {name: inner.kept[raw] for name, raw in self._names.items() if raw in inner.kept}
        self.kept |= {name: kept.format for name, kept in self._taken.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        if name in self._packed:
            yield self.read(name).flatten()
        else:
            yield from self.inner.chunks(self._names[name])

    def fill(self, name: str, out: Tensor) -> Iterator[Tensor]:
        if name in self._packed:
            yield from super().fill(name, out)
        else:
            yield from self.inner.fill(self._names[name], out)

    def read(self, name: str) -> Tensor:
        if name not in self._packed:
            return self.inner.read(self._names[name])
        packed = self._packed[name]
        return packed.restore([self.inner.read(source) for source in packed.sources])

    def take(self, name: str) -> dict[str, Tensor]:
        if name not in self._taken:
            return self.inner.take(self._names[name])
        kept = self._taken[name]
        return kept.take([self.inner.read(source) for source in kept.sources])

    def locate(self, name: str) -> str:
        return self.inner.locate(self._packed[name].sources[0] if name in self._packed else self._names[name])


def _restored(kept: Kept) -> Packed:
    """The weight as float32, for builds that store it otherwise."""
    return Packed(kept.sources, Stored(kept.shape, torch.float32), lambda parts: dequantize(kept.format, kept.take(parts)))
