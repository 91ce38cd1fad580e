"""What a block asks of the engine: the tensors it declares, before quantization and sharding.

Blocks declare; `models/` says which checkpoint tensors make each one; `builder/` fills them; `layers/loader.py`
gives them back at run time, sharded. A declaration is the single source of names, shapes and shard axes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# How a linear is split over tensor-parallel ranks.
# heads: output rows by query / key / value heads; column: output rows evenly within each part; row: input features;
# row_heads: input features by query heads; none: whole on every rank; vocab: output rows, padded.
Split = Literal["none", "column", "row", "heads", "row_heads", "vocab"]


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A weight [sum(parts), in_features] (or [num_experts, …]) that a quantization format may own, and its bias."""

    name: str  # "layers.0.attention.qkv": its tensors are name + ".weight", ".bias", and the format's own suffixes
    in_features: int
    parts: tuple[int, ...]  # output rows of each fused part: (q, k, v), (gate, up), (rows,)
    bias: bool = False
    split: Split = "none"
    head_size: int = 0  # heads splits: features of one head
    num_kv_heads: int = 0  # row_heads: kv heads that the query heads belong to; 0: each has its own
    num_experts: int = 0  # > 0: stacked experts
    quantize: bool = True  # routers, heads and embeddings stay in the engine's dtype unless a recipe says otherwise

    @property
    def out_features(self) -> int:
        return sum(self.parts)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        shape = (self.out_features, self.in_features)
        return (self.num_experts, *shape) if self.num_experts else shape

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (self.num_experts, self.out_features) if self.num_experts else (self.out_features,)


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A plain tensor: norms, embeddings, slopes, sinks. `name` is its full name in the engine."""

    name: str
    shape: tuple[int, ...]
    split: Literal["none", "vocab", "heads", "kv_heads"] = "none"  # along the first axis
    head_size: int = 1  # heads splits: rows of one head
    num_kv_heads: int = 0  # heads: kv heads that the query heads belong to; 0: each has its own
    dtype: str | None = None  # None: the engine's dtype


Spec = LinearSpec | TensorSpec
