"""The fused layer in plain PyTorch: its linears one after another."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.kernels.types import FusedLayer


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """Always False: one linear after another is as fast (`ops.supports_fused_layer`)."""
    return False


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """The linears of a fused layer, one after another (`ops.fused_layer`)."""
    residual = layer.out.alone(x, replace(layer.out.fusion, residual=residual))
    inner = layer.up.alone(residual, layer.up.fusion)
    residual = layer.down.alone(inner, replace(layer.down.fusion, residual=residual))
    return residual, None if layer.qkv is None else layer.qkv.alone(residual, layer.qkv.fusion)
