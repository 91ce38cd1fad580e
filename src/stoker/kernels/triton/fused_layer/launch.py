"""The fused layer in one launch: for a few tokens (`run_small_batch`), and for some against int4 (`run_large_batch`)."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.quantized import FusedLayer
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """See `ops.supports_fused_layer`."""
    return small_batch.is_uniform(layer) and (
        large_batch.supports_large_batch(layer, rows) or small_batch.supports_small_batch(layer, rows)
    )


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """See `ops.fused_layer`."""
    assert x.is_contiguous() and residual.is_contiguous()
    return (large_batch.run_large_batch if large_batch.supports_large_batch(layer, x.shape[0]) else small_batch.run_small_batch)(
        x, residual, layer
    )
