"""A step of few tokens: between one layer's attention and the next one's, all linears in one launch, where weights and device allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.kernels.quantized import Tail, TailLinear
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.attention import Attention
from stoker.layers.layer import Layer, PreNorm
from stoker.layers.mlp import MLP
from stoker.quant.format import LinearOp, row_weight

SOME = 32  # rows: a tail takes one of them, or some


class Tails:
    """The layers of a stage as attention and tails: the layouts of `layer`, cut between a layer's attention and its other linears."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.attentions: list[Attention] = [layer.attention for layer in layers]
        self.first = layers[0].attention_norm.fusion
        self.tails = list(_tails(layers))
        self._taken: dict[int, bool] = {}

    @staticmethod
    def of(layers: Sequence[Layer]) -> Tails | None:
        """None where a layer is of another kind, or linears do better alone."""
        if not layers or not all(_is_plain(layer) for layer in layers):
            return None
        made = Tails(layers)
        if made.take(1):
            for attention in made.attentions:
                attention.params = replace(attention.params, before_tail=True)
        return made if made.take(1) or made.take(SOME) else None

    def only(self, kept: Sequence[int]) -> Tails:
        """Those of some layers, as if these followed one another: for rehearsals."""
        tails = copy(self)
        tails.attentions, tails.tails = [self.attentions[i] for i in kept], [self.tails[i] for i in kept]
        return tails

    def take(self, rows: int) -> bool:
        """Whether so many rows are taken."""
        if rows not in self._taken:
            self._taken[rows] = all(ops.takes_tail(tail, rows) for tail in self.tails)
        return self._taken[rows]

    def __call__(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        """The stream [T, hidden] after the last layer, of as many rows as they `take`."""
        qkv: Tensor | None = self.attentions[0].qkv(x, self.first)
        for attention, tail, cache in zip(self.attentions, self.tails, caches, strict=True):
            assert qkv is not None
            x, qkv = ops.tail(attention.mixed(qkv, batch, cache), x, tail)
        return x


def _is_plain(layer: Layer) -> bool:
    """norm → attention → add → norm → gated MLP → add, on one rank."""
    attention, mlp = layer.attention, layer.mlp
    kinds = type(layer) is PreNorm and isinstance(attention, Attention) and isinstance(mlp, MLP)
    return kinds and mlp.gated and layer.residual_scale == 1.0 and mlp.group.size == 1


def _tails(layers: Sequence[Layer]) -> Iterator[Tail]:
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        qkv = None if after is None else _linear(after.attention.qkv, after.attention_norm.fusion)
        up = _linear(layer.mlp.up, layer.mlp_norm.gate(layer.mlp.activation))
        yield Tail(_linear(layer.attention.out, PLAIN), up, _linear(layer.mlp.down, PLAIN), qkv)


def _linear(linear: LinearOp, fusion: Fusion) -> TailLinear:
    return TailLinear(linear, row_weight(linear), fusion)
