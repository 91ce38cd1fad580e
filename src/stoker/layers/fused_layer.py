"""Small decode steps: all linears between the attention of two layers in one launch, where the weights and the device support it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.distributed.group import SINGLE, Group
from stoker.kernels import ops
from stoker.kernels.native.recording import Recordings
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion
from stoker.layers.attention import Attention
from stoker.layers.layer import Layer, PreNorm
from stoker.layers.linear import linear_all_reduce
from stoker.layers.mlp import MLP
from stoker.quant.linear_ops import LinearOp

LARGE_BATCH_ROWS = 32  # fused layers are created if 1 row or this number of rows is supported


class FusedLayers:
    """The layers of a stage, cut after each attention: an attention, then a fused layer up to the next attention, and so on.

    `params` are the attention parameters of each layer for steps in which a fused layer follows the attention.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.attentions: list[Attention] = [layer.attention for layer in layers]
        self.first = layers[0].attention_norm.fusion
        self.layers = list(_fused_layers(layers))
        self._supported: dict[int, bool] = {}
        self._recordings = Recordings()
        group = layers[0].attention.group
        self._max_rows = None if group.size == 1 else self._max_rows_of_all(group)
        before_fused_layer = self.supports(1)
        self.params = [replace(attention.params, before_fused_layer=before_fused_layer) for attention in self.attentions]

    @staticmethod
    def for_layers(layers: Sequence[Layer]) -> FusedLayers | None:
        """The fused layers of `layers`, or None when a layer has another layout or the kernel supports no number of rows."""
        if not layers or not all(can_be_cut(layer) for layer in layers):
            return None
        fused = FusedLayers(layers)
        return fused if fused.supports(1) or fused.supports(LARGE_BATCH_ROWS) else None

    def subset(self, indices: Sequence[int]) -> FusedLayers:
        """A copy that has only the layers at `indices`, for the ahead-of-time trace."""
        fused = copy(self)
        fused.attentions, fused.layers = [self.attentions[i] for i in indices], [self.layers[i] for i in indices]
        fused.params = [self.params[i] for i in indices]
        fused._recordings = Recordings()
        return fused

    def supports(self, rows: int) -> bool:
        """Whether the kernel computes all layers for a step of `rows` rows. The result is cached, and the same on all ranks."""
        if self._max_rows is not None:
            return rows <= self._max_rows
        if rows not in self._supported:
            self._supported[rows] = self._supports(rows)
        return self._supported[rows]

    def _supports(self, rows: int) -> bool:
        return all(ops.supports_fused_layer(layer, rows) for layer in self.layers)

    def _max_rows_of_all(self, group: Group) -> int:
        """The largest number of rows up to which every rank of `group` supports all layers.

        A rank that ran other kernels than its peers would wait for them forever. Without inboxes, no rank supports any number.
        """
        if group.inboxes is None:
            return 0
        rows = 0
        while rows < LARGE_BATCH_ROWS and self._supports(rows + 1):
            rows += 1
        return group.smallest(rows)

    def __call__(
        self, x: Tensor, batch: ForwardBatch, caches: list[KVCache], observe: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """The residual stream [T, hidden] after the last layer, from that before the first one.

        `supports` must accept the number of rows. `observe`: see `Decoder.observe_layers`.
        """
        if observe is None:
            return ops.replay(self._recordings, self._run, x, batch, caches)
        return self._run(x, batch, caches, observe)

    def _run(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache], observe: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """The result, layer after layer."""
        qkv: Tensor | None = self.attentions[0].qkv(x, self.first)
        for i, (attention, params, layer, cache) in enumerate(zip(self.attentions, self.params, self.layers, caches, strict=True)):
            assert qkv is not None
            if observe is not None:
                observe(i, x)
            x, qkv = ops.fused_layer(attention.attend_heads(qkv, batch, cache, params), x, layer)
        if observe is not None:
            observe(len(self.layers), x)
        return x


def can_be_cut(layer: Layer) -> bool:
    """Whether a layer has the form norm → attention → add → norm → gated MLP → add."""
    attention, mlp = layer.attention, layer.mlp
    kinds = type(layer) is PreNorm and isinstance(attention, Attention) and attention.gate is None and isinstance(mlp, MLP)
    return kinds and mlp.gated and not mlp.is_scaled and layer.residual_scale == 1.0


def _fused_layers(layers: Sequence[Layer]) -> Iterator[FusedLayer]:
    """For each layer, its linears after attention and the QKV linear of the next layer."""
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        qkv = None if following is None else _linear(following.attention.qkv, following.attention_norm.fusion)
        up, group = _linear(layer.mlp.up, layer.mlp_norm.gated_fusion(layer.mlp.activation)), layer.mlp.group
        yield FusedLayer(_linear(layer.attention.out, PLAIN, group), up, _linear(layer.mlp.down, PLAIN, group), qkv, group)


def _linear(linear: LinearOp, fusion: Fusion, group: Group = SINGLE) -> FusedLinear:
    """A linear of a block as an argument of `ops.fused_layer`. Its results are summed over `group`."""
    return FusedLinear(linear if group.size == 1 else partial(_all_reduced, linear, group), linear.packed_weight, fusion)


def _all_reduced(linear: LinearOp, group: Group, x: Tensor, fusion: Fusion) -> Tensor:
    """The linear alone, with the residual of `fusion` added to the sum over ranks."""
    return linear_all_reduce(linear, x, group, fusion.residual, replace(fusion, residual=None))
