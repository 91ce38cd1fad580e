"""Specs: the names, shapes and split axes of the tensors that a block declares, before quantization and sharding.

Blocks declare specs (`layers.decoder.declare`). An architecture names the checkpoint tensors of each, the builder converts them, and
`layers.loader` returns this rank's shards at run time. No other code decides names, shapes or split axes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# How a linear is split over tensor-parallel ranks:
#   none       every rank holds the whole weight
#   column     output rows, evenly within each part
#   heads      output rows by query, key and value heads
#   row        input features
#   row_heads  input features by query heads
#   vocab      output rows, padded to a multiple of the ranks
Split = Literal["none", "column", "row", "heads", "row_heads", "vocab"]


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A linear with weight [out_features, in_features], or [num_experts, out_features, in_features], and optionally a bias.

    A quantization format may replace the weight by its own tensors.
    """

    name: str  # such as "layers.0.attention.qkv"; its tensors are name + ".weight", ".bias" and the suffixes of the format
    in_features: int
    parts: tuple[int, ...]  # output rows of each fused part: (q, k, v), (gate, up), or a single one
    bias: bool = False
    split: Split = "none"
    head_size: int = 0  # features of one head, for splits by heads
    num_kv_heads: int = 0  # heads, row_heads: number of key-value heads that the query heads share; 0: that of the last part
    part_heads: tuple[int, ...] = ()  # heads: number of heads of each part, which are split independently; (): query and KV heads
    num_experts: int = 0  # more than 0: stacked experts
    quantize: bool = True  # False for routers, output heads and embeddings, which only an override of the recipe quantizes

    @property
    def out_features(self) -> int:
        """The number of output rows of all parts together."""
        return sum(self.parts)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight before quantization."""
        shape = (self.out_features, self.in_features)
        return (self.num_experts, *shape) if self.num_experts else shape

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of the bias."""
        return (self.num_experts, self.out_features) if self.num_experts else (self.out_features,)


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is never quantized: norms, position tables, ALiBi slopes, attention sinks."""

    name: str  # full name in the engine
    shape: tuple[int, ...]
    split: Literal["none", "vocab", "heads", "kv_heads"] = "none"  # along the first axis
    head_size: int = 1  # rows of one head, for splits by heads
    num_kv_heads: int = 0  # heads: number of key-value heads that the query heads share; 0: each query head has its own
    parts: tuple[int, ...] = ()  # kv_heads: rows of parts that are split independently; (): one part
    part_heads: tuple[int, ...] = ()  # kv_heads: number of heads of each part
    dtype: str | None = None  # None: the engine's dtype


Spec = LinearSpec | TensorSpec
