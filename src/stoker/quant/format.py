"""The interface of a weight format: how a weight is quantized, stored, sharded and packed for the kernels.

A format owns the stored tensors of one linear: `name.weight`, and further ones with suffixes such as `.scale` and `.zero`. Each format is
one file of `formats/`. Blocks of `layers` receive a `LinearOp` and never see a scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import EngineError
from stoker.base.registry import Registry
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.quant.linear_ops import ExpertsOp, LinearOp, PackedExperts, PackedLinear, SequentialExperts


class Layout(msgspec.Struct, frozen=True):
    """One stored tensor of an unsharded linear: its shape, and which of its axes correspond to the rows and columns of the weight.

    An index of `row_axis` covers `row_unit` output rows, and one of `col_axis` covers `col_unit` input features, so that slicing shards any
    format. Packed int4 pairs have a col_unit of 2, and group scales one of group_size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    row_axis: int | None = None
    col_axis: int | None = None
    row_unit: int = 1
    col_unit: int = 1


class Format(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format"):
    """A weight format with its settings, which the engine's config.json stores."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` and `folding_factors` need the calibration statistics of the linear's input."""
        return False

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs if inputs were not measured. None: the whole weight."""
        return None

    def aligned_to(self, rows: int, columns: int) -> Format:
        """This format with blocks and groups whose sizes divide `rows` and `columns`, if it can choose them. Shards can then end there."""
        return self

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, unsharded, for a model that computes in `dtype`.

        Raises ConfigError for a spec that it cannot store.
        """
        raise TypeError(f"{type(self).__name__} declares no layout")

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        """Quantize `weight` [(experts,) out, in]. Returns the stored tensors by suffix, as `layout` declares them.

        `stats`: the `InputStats` of the inputs that the linear `spec` had in calibration, or None.
        """
        raise TypeError(f"{type(self).__name__} cannot quantize")

    def folding_factors(self, weight: Tensor, spec: LinearSpec, stats: Any) -> Tensor | None:
        """Positive factors [in_features] for scale folding: the columns of the weight are multiplied by them before `quantize`.

        The build divides the input of the linear by them, in the preceding norm or linear. None: no folding.
        """
        return None

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, from this rank's stored tensors by suffix, which are removed from the dict."""
        raise TypeError(f"{type(self).__name__} cannot pack")

    def min_input_gate_rows(self, weight: PackedWeight) -> float:
        """The value of `LinearOp.min_input_gate_rows` for linears with this weight."""
        return math.inf

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp | ExpertsOp:
        """The linear, or the stacked experts, from this rank's stored tensors by suffix, which are removed from the dict."""
        weight = self.pack(tensors, bias)
        if weight.num_experts and weight.values.is_cpu and weight.format != "dense":
            return SequentialExperts([PackedLinear(ops.prepare_weight(weight.expert(i))) for i in range(weight.num_experts)])
        weight = ops.prepare_weight(weight)
        return PackedExperts(weight) if weight.num_experts else PackedLinear(weight, self.min_input_gate_rows(weight))


FORMATS: Registry[type[Format]] = Registry("quantization format")


class TensorSource(ABC):
    """A source of a rank's stored tensors, such as an engine's file or random numbers."""

    @abstractmethod
    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`, on the device. Raises EngineError unless it has this shape and dtype."""


class TensorTable(TensorSource):
    """A source that reads a dict of tensors by engine name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor with this name. Raises EngineError if its shape or dtype differs, and KeyError if there is none."""
        tensor = self.tensors[name]
        if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
            raise EngineError(f"{name} is {tensor.dtype} {list(tensor.shape)}; {dtype} {list(shape)} is expected.", cure="Report this.")
        return tensor
