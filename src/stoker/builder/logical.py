"""A checkpoint's tensors as the architecture knows them: older spellings renamed, packed ones restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.packed import find_packed
from stoker.builder.weights import Weights
from stoker.models import Architecture


class LogicalWeights(Weights):
    """`inner` under the names of `architecture`. `quantization` is config.json's quantization_config, if it has one."""

    def __init__(self, inner: Weights, architecture: Architecture, quantization: dict[str, Any] | None = None) -> None:
        self.inner = inner
        self.files = inner.files
        packed = find_packed(inner.stored, quantization) if isinstance(quantization, dict) else {}
        consumed = {source for tensor in packed.values() for source in tensor.sources}
        self._packed = {architecture.canonical(name): tensor for name, tensor in packed.items()}
        plain = [name for name in inner.stored if name not in consumed]
        self._names = {architecture.canonical(name): name for name in plain}
        if len(self._names) < len(plain):
            twice = next(name for name in plain if self._names[architecture.canonical(name)] != name)
            raise CheckpointError(f"{inner.locate(twice)} is there twice, under two spellings.", cure="Remove one of them.")
        self.stored = {name: inner.stored[raw] for name, raw in self._names.items()}
        self.stored |= {name: tensor.stored for name, tensor in self._packed.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        if name in self._packed:
            yield self.read(name).flatten()
        else:
            yield from self.inner.chunks(self._names[name])

    def read(self, name: str) -> Tensor:
        if name not in self._packed:
            return self.inner.read(self._names[name])
        packed = self._packed[name]
        return packed.restore([self.inner.read(source) for source in packed.sources])

    def locate(self, name: str) -> str:
        return self.inner.locate(self._packed[name].sources[0] if name in self._packed else self._names[name])
