"""Small decode steps: all linears between the attention of two layers in one launch, where the weights and the device support it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion
from stoker.layers.attention import Attention
from stoker.layers.layer import Layer, PreNorm
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
        before_fused_layer = self.supports(1)
        self.params = [replace(attention.params, before_fused_layer=before_fused_layer) for attention in self.attentions]

    @staticmethod
    def for_layers(layers: Sequence[Layer]) -> FusedLayers | None:
        """The fused layers of `layers`, or None when a layer has another layout or the kernel supports no number of rows."""
        if not layers or not all(_can_be_cut(layer) for layer in layers):
            return None
        fused = FusedLayers(layers)
        return fused if fused.supports(1) or fused.supports(LARGE_BATCH_ROWS) else None

    def subset(self, indices: Sequence[int]) -> FusedLayers:
        """A copy that has only the layers at `indices`, for the ahead-of-time trace."""
        fused = copy(self)
        fused.attentions, fused.layers = [self.attentions[i] for i in indices], [self.layers[i] for i in indices]
        fused.params = [self.params[i] for i in indices]
        return fused

    def supports(self, rows: int) -> bool:
        """Whether the kernel computes all layers for a step of `rows` rows. The result is cached."""
        if rows not in self._supported:
            self._supported[rows] = all(ops.supports_fused_layer(layer, rows) for layer in self.layers)
        return self._supported[rows]

    def __call__(
        self, x: Tensor, batch: ForwardBatch, caches: list[KVCache], observe: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """The residual stream [T, hidden] after the last layer, from that before the first one.

        `supports` must accept the number of rows. `observe`: see `Decoder.observe_layers`.
        """
        qkv: Tensor | None = self.attentions[0].qkv(x, self.first)
        for i, (attention, params, layer, cache) in enumerate(zip(self.attentions, self.params, self.layers, caches, strict=True)):
            assert qkv is not None
            if observe is not None:
                observe(i, x)
            x, qkv = ops.fused_layer(attention.attend_heads(qkv, batch, cache, params), x, layer)
        if observe is not None:
            observe(len(self.layers), x)
        return x


def _can_be_cut(layer: Layer) -> bool:
    """Whether a layer has the form norm → attention → add → norm → gated MLP → add, without tensor parallelism."""
    attention, mlp = layer.attention, layer.mlp
    kinds = type(layer) is PreNorm and isinstance(attention, Attention) and attention.gate is None and isinstance(mlp, MLP)
    return kinds and mlp.gated and not mlp.is_scaled and layer.residual_scale == 1.0 and mlp.group.size == 1


def _fused_layers(layers: Sequence[Layer]) -> Iterator[FusedLayer]:
    """For each layer, its linears after attention and the QKV linear of the next layer."""
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        qkv = None if following is None else _linear(following.attention.qkv, following.attention_norm.fusion)
        up = _linear(layer.mlp.up, layer.mlp_norm.gated_fusion(layer.mlp.activation))
        yield FusedLayer(_linear(layer.attention.out, PLAIN), up, _linear(layer.mlp.down, PLAIN), qkv)


def _linear(linear: LinearOp, fusion: Fusion) -> FusedLinear:
    """A linear of a block as an argument of `ops.fused_layer`."""
    return FusedLinear(linear, linear.packed_weight, fusion)
