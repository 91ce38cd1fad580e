"""The fused layer on a GPU: one launch of the small-batch (1–8 tokens) or the large-batch kernel (3–64 tokens, bfloat16 × int4)."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.triton.fused_layer.large_batch.launch import run_large_batch, supports_large_batch
from stoker.kernels.triton.fused_layer.requirements import meets_requirements
from stoker.kernels.triton.fused_layer.small_batch.launch import run_small_batch, supports_small_batch
from stoker.kernels.types import FusedLayer


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """Whether one of the two kernels computes `rows` rows of the layer (`ops.supports_fused_layer`)."""
    return meets_requirements(layer) and (supports_large_batch(layer, rows) or supports_small_batch(layer, rows))


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """Compute a fused layer by one launch of the large-batch kernel if it supports the layer, else of the small-batch kernel.

    See `ops.fused_layer`. The caller has checked `supports_fused_layer`.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    run = run_large_batch if supports_large_batch(layer, x.shape[0]) else run_small_batch
    return run(x, residual, layer)
