"""The seam of quantization: a weight is an object that knows how to be made, laid out, split and turned into a linear.

A format owns the tensors of one linear: `name.weight`, and whatever suffixes it adds (`.scale`, `.zero`). Model code
asks for a linear and never sees a scale. One file per format in this package, one row in FORMATS.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.registry import Registry
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.quant.linear_ops import ExpertsOp, LinearOp, PackedExperts, PackedLinear, SequentialExperts


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

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight of this rank's stored tensors. The dict is consumed, so that stored tensors can be freed."""
        raise TypeError(f"{type(self).__name__} cannot pack")

    def min_input_gate_rows(self, weight: PackedWeight) -> float:
        """See `LinearOp.min_input_gate_rows`."""
        return math.inf

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp | ExpertsOp:
        """The linear, or the stacked experts, of this rank's stored tensors. The dict is consumed."""
        weight = self.pack(tensors, bias)
        if weight.num_experts and weight.values.is_cpu and weight.format != "dense":
            return SequentialExperts([PackedLinear(ops.prepare_weight(weight.expert(i))) for i in range(weight.num_experts)])
        weight = ops.prepare_weight(weight)
        return PackedExperts(weight) if weight.num_experts else PackedLinear(weight, self.min_input_gate_rows(weight))


FORMATS: Registry[type[Format]] = Registry("quantization format")


class TensorSource(ABC):
    """Where a rank's stored tensors come from: an engine's file, or random numbers."""

    @abstractmethod
    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`, on the device. Raises EngineError unless it has this shape and dtype."""
