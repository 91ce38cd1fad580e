"""Quantized weights as the ops take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.kernels.types import Fusion


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A linear's weight, or stacked experts', in groups of `group_size` input features that share a scale.

    The last group of a row may be shorter.
    A value is (code - 8) × scale, or (code - zero) × scale where there is `zero`, or code × scale + offset where there is `offset`.
    `packed` is whatever else a device's kernel reads, made once by `ops.pack_int4`.
    """

    codes: Tensor  # uint8 [(experts,) N, K / 2]: feature 2i in the low nibble of byte i, 2i + 1 in the high one
    scale: Tensor  # float [(experts,) N, ceil(K / group_size)]
    zero: Tensor | None  # uint8, as scale
    offset: Tensor | None  # float, as scale
    group_size: int
    packed: Any = None

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[-1]


@dataclass(frozen=True, slots=True)
class GroupedInt8Weight:
    """A linear's weight of int8 in groups of `group_size` input features, the last of which may be shorter: code × scale + offset."""

    codes: Tensor  # int8 [N, K]
    scale: Tensor  # float [N, ceil(K / group_size)]
    offset: Tensor | None  # as scale
    group_size: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked experts of one byte a weight: float8_e4m3fn or int8 [num_experts, N, K] × scale float32 [num_experts, N]."""

    weight: Tensor
    scale: Tensor
    activations: str  # none: as they are; token, static: codes of the weight's dtype by each row's own scale, or by input_scale
    input_scale: Tensor | None = None  # float32 [1]


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """Stacked experts of groupwise int4, as `ops.pack_int4` leaves them."""

    weight: Int4Weight
    order: Tensor | None = None  # int32 [num_experts, K]: the input features in the order of an expert's columns


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """Stacked experts of block-scaled FP8, multiplied by e4m3 activations with a scale for each `columns` neighbours of a row."""

    weight: Tensor  # float8_e4m3fn [num_experts, N, K]
    scale: Tensor  # float32 [num_experts, ceil(N / rows), ceil(K / columns)]
    block: tuple[int, int]  # (rows, columns)


@dataclass(frozen=True, slots=True)
class Int8Experts:
    """Stacked experts of int8 in groups of `group_size` (a power of two) input features: a value is code × scale + offset."""

    weight: Tensor  # int8 [num_experts, N, K]
    scale: Tensor  # float [num_experts, N, ceil(K / group_size)]
    offset: Tensor | None  # as scale
    group_size: int


StoredExperts = ExpertWeights | Int4Experts | Int8Experts | BlockExperts


@dataclass(frozen=True, slots=True)
class RowWeight:
    """A weight as it lies for a kernel of several linears.

    `form`: float32, bfloat16 or float16 (as it is), fp8 (activations by the row's own scale), bytes (int8; in groups on a CPU only), int4
    (on a GPU paired groups of `group` features, with `scale` and `zero` [groups, n]; on a CPU as they are stored).
    """

    form: str
    weight: Tensor  # [n, numbers of 16 or 8 bits]
    scale: Tensor | None  # None: without one
    bias: Tensor | None
    zero: Tensor | None = None
    zero_kind: str = "none"  # none, int, float
    group: int = 0

    @property
    def row_bytes(self) -> int:
        return self.weight.shape[1] * self.weight.element_size()


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One linear of a `FusedLayer`: by itself, as a weight (None: no kernel of several linears takes it), and what is fused into it."""

    alone: Callable[[Tensor, Fusion], Tensor]
    weight: RowWeight | None
    fusion: Fusion

    @property
    def outputs(self) -> int:
        """Features that it gives: half of a gated weight's rows."""
        assert self.weight is not None
        return int(self.weight.weight.shape[0]) // (1 if self.fusion.gate is None else 2)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedLayer:
    """What follows attention in a layer, up to the next layer's queries, keys and values (None after the last layer)."""

    out: FusedLinear  # + the stream
    up: FusedLinear  # of the stream, normed; gated
    down: FusedLinear  # + the stream
    qkv: FusedLinear | None  # of the stream, normed

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        return (self.out, self.up, self.down) if self.qkv is None else (self.out, self.up, self.down, self.qkv)
