"""RMS norm (arXiv 1910.07467) and layer norm, in one pass over each row.

For a row x of `size` features, in float32:

    rms      y = x / sqrt(mean(x²) + eps) × weight
    layer    y = (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) × weight + bias

Grid: one CTA per ROWS rows. A row is held in the registers of one CTA (BLOCK: size rounded up to a power of two), so it is read once.
Rows may be the heads of a fused projection: row r starts at (r // INNER) × stride_outer + (r % INNER) × stride_inner.

    x as [outer, inner, size]:   | token 0: q0 q1 q2 ... | k0 k1 ... | v0 ... |      inner: heads; stride_inner = size of a head
                                 | token 1: q0 q1 ...                             stride_outer = width of the fused projection

Theoretical floor: one read and one write of each row at the speed of memory. Not measured by itself: in a decode step linears apply norms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

KINDS = ("rms", "layer")
MAX_SIZE = 1 << 16  # features of a row, which one CTA holds in registers
EARLY_ROWS = 256  # up to which the weight is loaded before the wait: about two CTAs per SM


@triton.jit
def normalize(
    x,  # float32 [ROWS, BLOCK], zero where a column is not inside
    inside,  # bool [ROWS, BLOCK]
    weight,  # float32 [1, BLOCK]
    bias,  # float32 [1, BLOCK], of a layer norm
    eps,
    SIZE: tl.constexpr,
    RMS: tl.constexpr,  # False: layer norm
):
    """The rows of x after the norm, in float32."""
    if not RMS:
        mean = tl.sum(x, axis=1) / SIZE
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / SIZE + eps)  # [ROWS]
    x = x * scale[:, None] * weight
    if not RMS:
        x = x + bias
    return x


@triton.jit
def load_parameters(ptr, cols, SIZE: tl.constexpr, ABSENT: tl.constexpr, EARLY: tl.constexpr):
    """float32 [1, BLOCK]: the weight or bias of a norm, or ABSENT everywhere for None. Kernels call this before `pdl_wait`.

    With EARLY the values arrive while the kernel before still runs: the load is volatile, because the assembler moves others behind the
    wait. Volatile loads do not use the L1 cache, which CTAs of one SM share.
    """
    if ptr is None:
        return tl.full(cols.shape, ABSENT, tl.float32)
    else:
        return tl.load(ptr + cols, mask=cols < SIZE, other=0.0, volatile=EARLY).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    # Pointers
    x_ptr,
    weight_ptr,  # [SIZE] or None
    bias_ptr,  # [SIZE] or None
    out_ptr,  # [num_rows, SIZE], dense
    # Sizes and strides
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    # Constants
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    RMS: tl.constexpr,  # False: layer norm
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,  # see `load_parameters`
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: normalize ROWS rows. Row r starts at (r // INNER) × stride_outer + (r % INNER) × stride_inner elements."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows)[:, None] & (cols < SIZE)
    weight = load_parameters(weight_ptr, cols, SIZE, 1.0, EARLY)
    bias = load_parameters(bias_ptr, cols, SIZE, 0.0, EARLY)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = (rows // INNER * stride_outer + rows % INNER * stride_inner)[:, None] + cols
    x = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    x = normalize(x, inside, weight, bias, eps, SIZE, RMS)
    tl.store(out_ptr + rows[:, None] * SIZE + cols, x.to(out_ptr.dtype.element_ty), mask=inside)


def norm_warps(elements: int) -> int:
    """The number of warps of a CTA that normalizes rows of `elements` elements: eight elements per thread, of long rows more."""
    return min(16, max(1, elements // 256))


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """RMS or layer norm over the last axis (`ops.norm`). x [..., size] is dense, or a view [T, heads, size] of a fused projection.

    Raises ValueError for an unknown kind or a row of more than MAX_SIZE features.
    """
    view = x if x.dim() == 3 and x.stride(-1) == 1 else x.contiguous().view(-1, 1, x.shape[-1])
    outer, inner, size = view.shape
    if kind not in KINDS:
        raise ValueError(f"norm kind {kind!r} is none of {', '.join(KINDS)}")
    if size > MAX_SIZE:
        raise ValueError(f"norm over {size} features; this kernel holds a row in registers and supports at most {MAX_SIZE}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = outer * inner
    if num_rows == 0:
        return out
    block = next_power_of_2(size)
    rows = max(1, 2048 // block) if num_rows >= 1024 else 1
    norm_kernel[(cdiv(num_rows, rows),)](
        view,
        weight,
        bias if kind == "layer" else None,
        out,
        num_rows,
        view.stride(0),
        view.stride(1),
        eps,
        INNER=inner,
        SIZE=size,
        RMS=kind == "rms",
        ROWS=rows,
        EARLY=num_rows <= EARLY_ROWS,
        BLOCK=block,
        num_warps=norm_warps(rows * block),
        **pdl_launch_options(x),
    )
    return out
