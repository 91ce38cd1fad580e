"""From the sums of a tile to the output, and the combination of split-K slices: shared by both skinny GEMM kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import activated


@triton.jit
def is_last_split(finished_ptr, tile, splits):
    """Increment the counter of finished CTAs of a tile. True for the last of its `splits` CTAs, which then sees the slices of all others.

    The barrier orders the stores of all threads before the atomic of one; `acq_rel` orders them before the loads of the last CTA.
    """
    tl.debug_barrier()
    return tl.atomic_add(finished_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1


@triton.jit
def store_outputs(
    y,  # float32 sums of rows `rows`
    up,  # float32 sums of rows n + `rows` (GATED)
    rows,  # weight row of each sum
    tokens,  # token of each sum
    m,
    n,
    row_scale_ptr,  # float32 [rows of the weight], or None
    token_scale_ptr,  # float32 [m], or None
    epilogue,  # Epilogue
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store out[token, row] = act(scales × y + bias) × (scales × up + bias) + residual; without GATED the factor with `up` is absent.

    y, up, rows and tokens have the same shape.
    """
    is_row = rows < n
    inside = is_row & (tokens < m)
    if token_scale_ptr is not None:
        token_scale = tl.load(token_scale_ptr + tokens, mask=inside, other=0.0)
        y *= token_scale
        if GATED:
            up *= token_scale
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
        if GATED:
            up *= tl.load(row_scale_ptr + n + rows, mask=is_row, other=0.0)
    if epilogue.bias_ptr is not None:
        y += tl.load(epilogue.bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(epilogue.bias_ptr + n + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        y = activated(y, ACTIVATION) * up
    offsets = tokens.to(tl.int64) * n + rows
    if epilogue.residual_ptr is not None:
        y += tl.load(epilogue.residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(epilogue.out_ptr + offsets, y.to(epilogue.out_ptr.dtype.element_ty), mask=inside)
