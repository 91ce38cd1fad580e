"""Steps of many prompt tokens on several ranks, in two halves, so that the sum of one over the ranks overlaps with products of the other.

Everything between the attention of two layers is computed for each half of the rows (A and B); attention needs all rows.

    kernels              out A | out B | up, down A | up, down B | qkv A  | qkv B | attention
    sums over the ranks          out A | out B      | down A     | down B

A sum runs beside the kernels of the column below which it begins. Its residual is added when it is complete, into the rows of the half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.layers.fused_layer import can_be_cut
from stoker.layers.layer import Layer
from stoker.layers.low_rank import Adapters

# With fewer tokens, products of half of the rows would be limited by reading the weights. Captured steps with prompts have fewer tokens.
MIN_TOKENS = 4096
# tokens × hidden size² ÷ ranks, which the work of a layer is proportional to. With less, launches may take longer than the kernels, because
# the host launches twice as many. This is the smallest measured step, 70B on two GPUs with 4,096 tokens, which takes 268 instead of 287 ms.
MIN_WORK = 1 << 37
ROW_TILE = 128  # the first half ends between two tiles of products


class OverlappedLayers:
    """The layers of a stage, for steps with many tokens."""

    def __init__(self, layers: Sequence[Layer], adapters: Adapters | None, width: int, device: torch.device) -> None:
        self.layers, self.adapters = layers, adapters
        self.group = layers[0].attention.group
        launched = 0 if device.type == "cpu" else -(-self.group.size * MIN_WORK // width**2)
        self.min_tokens = max(MIN_TOKENS, launched)

    @staticmethod
    def for_layers(layers: Sequence[Layer], adapters: Adapters | None, width: int, device: torch.device) -> OverlappedLayers | None:
        """The overlapped layers of `layers`, or None on a single rank and when a layer has another form than those of fused layers.

        `width`: the number of features of the residual stream.
        """
        if not layers or not all(can_be_cut(layer) for layer in layers) or layers[0].attention.group.size == 1:
            return None
        return OverlappedLayers(layers, adapters, width, device)

    def supports(self, batch: ForwardBatch, row_bytes: int) -> bool:
        """Whether a step is computed in halves. `row_bytes`: the size of a row of the residual stream. The same on all ranks.

        Decodes are not: they read the weights, which two halves would do twice.
        """
        if batch.num_tokens < self.min_tokens or batch.is_decode or batch.verified is not None:
            return False
        return self.group.overlaps(_half(batch.num_tokens) * row_bytes)

    def reserve(self, max_tokens: int, row_bytes: int) -> None:
        """Allocate memory for the sums of steps with up to `max_tokens` tokens. Every rank of the group calls it, before the first step."""
        if max_tokens >= self.min_tokens:
            self.group.reserve((max_tokens // 2 + ROW_TILE) * row_bytes)

    def __call__(
        self,
        x: Tensor,
        batch: ForwardBatch,
        caches: list[KVCache],
        observe: Callable[[int, Tensor], None] | None = None,
        after_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        """The residual stream [T, hidden] after the last layer, from that before the first one. `supports` must accept the batch.

        `observe`, `after_layer`: see `Decoder.observe_layers` and `Decoder.after_layer`.
        """
        begin, half = self.group.begin_sum, _half(batch.num_tokens)
        halves = slice(half), slice(half, None)
        first = self.layers[0]
        qkv: Tensor = first.attention.qkv(x, first.attention_norm.fusion)
        for i, (layer, following, cache) in enumerate(zip(self.layers, [*self.layers[1:], None], caches, strict=True)):
            if observe is not None:
                observe(i, x)
            attention = layer.attention
            heads = attention.attend_heads(qkv, batch, cache, attention.params)
            attended, out, parts = torch.empty_like(x), torch.empty_like(x), []
            sums = [begin(attention.out(heads[rows])) for rows in self._selected(halves, batch)]
            for rows in self._selected(halves, batch):
                ops.add_summands(sums.pop(0)(), x[rows], attended[rows])
                sums.append(begin(layer.mlp.partial(attended[rows], layer.mlp_norm)))
            for rows in self._selected(halves, batch):
                ops.add_summands(sums.pop(0)(), attended[rows], out[rows])
                if following is not None:
                    parts.append(following.attention.qkv(out[rows], following.attention_norm.fusion))
            x = out
            if parts:
                qkv = torch.cat(parts)
            if after_layer is not None:
                after_layer()
        if observe is not None:
            observe(len(self.layers), x)
        return x

    def _selected(self, halves: tuple[slice, slice], batch: ForwardBatch) -> Iterator[slice]:
        """The rows of each half. While they are used, linears apply the adapters of these rows, and afterwards those of all rows."""
        ids = batch.adapter_ids
        for rows in halves:
            if self.adapters is not None:
                self.adapters.ids = None if ids is None else ids[rows]
            yield rows
        if self.adapters is not None:
            self.adapters.ids = ids


def _half(num_tokens: int) -> int:
    """The number of rows of the first half: about half of the tokens, and whole tiles."""
    return (num_tokens // 2 + ROW_TILE // 2) // ROW_TILE * ROW_TILE
