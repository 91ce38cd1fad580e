"""The seam of quantization: a weight is an object that knows how to be made, laid out, split and turned into a linear.

A format owns the tensors of one linear: `name.weight`, and whatever suffixes it adds (`.scale`, `.zero`). Model code
asks for a linear and never sees a scale. One file per format in this package, one row in FORMATS.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from stoker.base.registry import Registry
from stoker.core.specs import LinearSpec
from stoker.kernels.quantized import RowWeight
from stoker.kernels.routing import Routing
from stoker.kernels.types import PLAIN, Fusion


class LinearOp(Protocol):
    """A linear ready to run: x [T, in_features] → [T, out_features], in x's dtype.

    `fusion` asks for a norm before the product, and a gate and a residual after it; `ops.around` serves formats without fused kernels.
    """

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor: ...


def gates_input_from(linear: LinearOp) -> float:
    """Rows from which a linear would rather gate its input (`Fusion.input_gate`) than have the one before it gate its output."""
    return getattr(linear, "gates_input_from", math.inf)


def row_weight(linear: LinearOp) -> RowWeight | None:
    """The linear's weight for a kernel of several linears, of formats that have such a kernel."""
    found = getattr(linear, "row_weight", None)
    return None if found is None else found()


class EmbeddingOp(LinearOp, Protocol):
    """A linear whose weight rows are also looked up: the token embedding, and the head that is tied to it."""

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight for int32 `token_ids` [T], [T, in_features] in `dtype`."""
        ...


class ExpertsOp(Protocol):
    """Stacked experts ready to run (a spec with num_experts > 0)."""

    def up(self, x: Tensor, routing: Routing) -> Tensor:
        """x [T, in_features] → [T × k, out_features] in the order of routing.order."""
        ...

    def down(self, x: Tensor, routing: Routing) -> Tensor:
        """x [T × k, in_features] in that order → [T, out_features]: the weighted sum of each token's choices."""
        ...


class Layout(msgspec.Struct, frozen=True):
    """One stored tensor of a linear, whole: how big it is and which of its axes follow the weight's rows and columns.

    An index along `row_axis` covers `row_unit` output rows and one along `col_axis` `col_unit` input features, so any
    format is split by slicing (a packed nibble pair has col_unit 2; a group scale has col_unit group_size).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    row_axis: int | None = None
    col_axis: int | None = None
    row_unit: int = 1
    col_unit: int = 1


class Format(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format"):
    """A weight format with its settings. The struct itself is stored in the engine's config.json."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` and `smooth` want the linear's calibration statistics."""
        return False

    @property
    def rows_together(self) -> int | None:
        """The rows that `quantize` must see at once when nothing was measured: those of a block, or None for the whole weight."""
        return None

    def fitted(self, rows: int, columns: int) -> Format:
        """The same format with units that ranks can be cut between: at every multiple of `rows` and `columns`, where it has a choice."""
        return self

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, for a model of arithmetic dtype `dtype`; shapes as if on one rank."""
        raise TypeError(f"{type(self).__name__} declares no layout")

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        """Store `weight` [(experts,) out, in]: tensors by suffix, as `layout` says. `stats`: what calibration measured for this input."""
        raise TypeError(f"{type(self).__name__} cannot quantize")

    def smooth(self, weight: Tensor, spec: LinearSpec, stats: Any) -> Tensor | None:
        """Positive factors [in_features] that the weight's columns are to be multiplied by, and its input divided by, before `quantize`.

        The build divides what feeds the linear: a norm, or the rows of the linear before it. None: as it is.
        """
        return None

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp | ExpertsOp:
        """The linear, or the stacked experts, of this rank's stored tensors, repacked for their device if need be. The dict is consumed."""
        raise TypeError(f"{type(self).__name__} cannot load")


FORMATS: Registry[type[Format]] = Registry("quantization format")


class TensorSource(ABC):
    """Where a rank's stored tensors come from: an engine's file, or random numbers."""

    @abstractmethod
    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`, on the device. Raises EngineError unless it has this shape and dtype."""
