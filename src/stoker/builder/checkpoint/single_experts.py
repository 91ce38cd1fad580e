"""A checkpoint with stacked experts, seen as one that stores each linear of an expert by itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.models.stacked_experts import ExpertPart, expert_parts
from stoker.quant.format import Format


class SingleExperts(CheckpointWeights):
    """The tensors of `inner`, of which those with stacked experts are replaced by their linears."""

    def __init__(self, inner: CheckpointWeights) -> None:
        self.inner, self.files = inner, inner.files
        self.prequantized: dict[str, Format] = dict(inner.prequantized)
        self.tensors: dict[str, TensorInfo] = {}
        self._parts: dict[str, tuple[str, ExpertPart]] = {}  # the stacked tensor of each linear, and its range
        for name, info in inner.tensors.items():
            parts = expert_parts(name, info.shape)
            if twice := [part.name for part in parts if part.name in inner.tensors]:
                raise CheckpointError(f"{inner.location(twice[0])} is also in the stacked tensor {name!r}.", cure="Remove one of them.")
            self._parts |= {part.name: (name, part) for part in parts}
            self.tensors |= {part.name: TensorInfo(part.shape, info.dtype) for part in parts} or {name: info}

    def chunks(self, name: str) -> Iterator[Tensor]:
        if name not in self._parts:
            yield from self.inner.chunks(name)
            return
        stacked, part = self._parts[name]
        rows, columns = part.shape
        yield from self.inner.range_chunks(stacked, part.first, part.first + rows * columns)

    def copy_into(self, name: str, out: Tensor) -> Iterator[Tensor]:
        if name in self._parts:
            yield from super().copy_into(name, out)
        else:
            yield from self.inner.copy_into(name, out)

    def read_prequantized(self, name: str) -> dict[str, Tensor]:
        return self.inner.read_prequantized(name)

    def location(self, name: str) -> str:
        return self.inner.location(self._parts[name][0] if name in self._parts else name)
