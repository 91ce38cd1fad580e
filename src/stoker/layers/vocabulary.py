"""The token embedding and the output head, on one rank or with their rows divided among ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.specs import LinearSpec
from stoker.distributed.group import Group
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion, TokenScores
from stoker.layers.loader import Loader
from stoker.layers.shard import local_spec
from stoker.quant.linear_ops import LinearOp


class Embedding:
    """Looks up rows of the table by token id. With a sharded table, each rank looks up its own rows, and an all-reduce combines them."""

    def __init__(self, table: LinearOp, spec: LinearSpec, loader: Loader) -> None:
        if not table.is_embedding:
            chosen = type(loader.recipe.format_for(spec)).__name__
            raise ConfigError(f"{spec.name}: rows of {chosen} weights cannot be looked up.", cure="Use INT8 or no quantization for it.")
        self.table, self.group = table, loader.group
        self.is_split = spec.split == "vocab" and loader.sharding.size > 1
        self.num_rows = local_spec(spec, loader.sharding).out_features

    @property
    def num_bytes(self) -> int:
        """The size of the table on this rank."""
        return _weight_bytes(self.table)

    def __call__(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The embeddings [T, width] of int32 `token_ids` [T], in `dtype`."""
        if not self.is_split:
            return self.table.embed(token_ids, dtype)
        local = token_ids - self.group.rank * self.num_rows
        is_local = (local >= 0) & (local < self.num_rows)
        rows = self.table.embed(local.clamp(0, self.num_rows - 1), dtype)
        return ops.all_reduce(rows.masked_fill_(~is_local[:, None], 0), self.group)


class Head:
    """The output head. Each rank computes the logits of its rows of the vocabulary. Then all ranks receive all logits, or the largest ones.

    `bias` [local rows] is that of a head whose weight is the token embedding, which as a linear has none.
    """

    def __init__(self, linear: LinearOp, vocab_size: int, group: Group, bias: Tensor | None = None) -> None:
        self.linear, self.vocab_size, self.group, self.bias = linear, vocab_size, group, bias

    @property
    def num_bytes(self) -> int:
        """The size of the weight on this rank."""
        return _weight_bytes(self.linear)

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        """Logits [T, local rows] of this rank's rows of the vocabulary, those of the last ranks with padding."""
        logits = self.linear(x, fusion)
        return logits if self.bias is None else logits + self.bias

    def gather(self, logits: Tensor) -> Tensor:
        """Logits [T, vocab] on all ranks, from those of each rank's rows."""
        return logits if self.group.size == 1 else self.group.all_gather(logits)[:, : self.vocab_size]

    def greedy(self, logits: Tensor) -> Tensor:
        """The token ids int32 [T] of the largest logits on all ranks, from those of each rank's rows (`ops.sample_shards`)."""
        return ops.sample_shards(logits, self.vocab_size, self.group)

    def score(self, x: Tensor, targets: Tensor, fusion: Fusion = PLAIN, scale: float = 1.0, softcap: float | None = None) -> TokenScores:
        """How well the logits of x [T, width], which one rank computes alone, predict the tokens `targets` (`ops.score_tokens`)."""
        weight = self.linear.packed_weight
        if weight is None or self.group.size > 1:
            raise ValueError("scores need a head that is one product, on one rank")
        weight = weight if self.bias is None else replace(weight, bias=self.bias)
        return ops.score_tokens(x, weight, targets, fusion, scale, softcap)


def _weight_bytes(linear: LinearOp) -> int:
    """The size of the packed weight of a linear; 0 for a linear that has none."""
    return 0 if linear.packed_weight is None else linear.packed_weight.num_bytes
