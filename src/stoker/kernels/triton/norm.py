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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import Fusion

KINDS = ("rms", "layer")
MAX_SIZE = 1 << 16  # features of a row, which one CTA holds in registers
EARLY_ROWS = 256  # up to which the weight is loaded before the wait: about two CTAs per SM


class NormPointers(NamedTuple):
    """The tensors of one of two norms that one launch computes."""

    x_ptr: Tensor
    weight_ptr: Tensor | None
    bias_ptr: Tensor | None
    out_ptr: Tensor


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


@triton.jit
def norm_rows(
    x_ptr,  # see `norm_kernel` for these and further arguments
    weight_ptr,
    bias_ptr,
    out_ptr,
    cta,  # number of the CTA among those of this tensor
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Normalize ROWS rows. Row r starts at (r // INNER) × stride_outer + (r % INNER) × stride_inner elements."""
    rows = cta.to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
    cta = tl.program_id(0)
    norm_rows(
        x_ptr, weight_ptr, bias_ptr, out_ptr, cta, num_rows, stride_outer, stride_inner, eps, INNER, SIZE, RMS, ROWS, EARLY, BLOCK, USE_PDL
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_q_rows", "num_k_rows"])
def norm_pair_kernel(
    # Groups of pointers
    q,  # NormPointers
    k,  # NormPointers
    # Sizes and strides
    num_q_rows,
    num_k_rows,
    q_outer,
    q_inner,
    k_outer,
    k_inner,
    eps,
    # Constants
    Q_INNER: tl.constexpr,
    K_INNER: tl.constexpr,
    SIZE: tl.constexpr,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: normalize ROWS rows of q, or of k, whose CTAs come after those of q. Both are described by `norm_kernel`."""
    cta = tl.program_id(0)
    q_ctas = tl.cdiv(num_q_rows, ROWS)
    if cta < q_ctas:
        norm_rows(
            q.x_ptr, q.weight_ptr, q.bias_ptr, q.out_ptr, cta, num_q_rows, q_outer, q_inner, eps,
            Q_INNER, SIZE, RMS, ROWS, EARLY, BLOCK, USE_PDL,
        )  # fmt: skip
    else:
        norm_rows(
            k.x_ptr, k.weight_ptr, k.bias_ptr, k.out_ptr, cta - q_ctas, num_k_rows, k_outer, k_inner, eps,
            K_INNER, SIZE, RMS, ROWS, EARLY, BLOCK, USE_PDL,
        )  # fmt: skip


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
    block, rows = next_power_of_2(size), _rows_of_cta(num_rows, size)
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


def norm_pair(q: Tensor, k: Tensor, q_norm: Fusion, k_norm: Fusion) -> tuple[Tensor, Tensor]:
    """The norms of the heads of q and k (`ops.norm_pair`), in one launch."""
    size, num_rows = q.shape[-1], q.shape[:-1].numel() + k.shape[:-1].numel()
    if num_rows == 0:
        return q, k
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    is_layer = q_norm.norm_kind == "layer"
    groups = [
        NormPointers(x, each.norm_weight, each.norm_bias if is_layer else None, out)
        for x, each, out in zip((q, k), (q_norm, k_norm), outs, strict=True)
    ]
    (tokens, q_heads, _), k_heads = q.shape, k.shape[1]
    block, rows = next_power_of_2(size), _rows_of_cta(num_rows, size)
    norm_pair_kernel[(cdiv(tokens * q_heads, rows) + cdiv(tokens * k_heads, rows),)](
        *groups,
        tokens * q_heads,
        tokens * k_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        q_norm.norm_eps,
        Q_INNER=q_heads,
        K_INNER=k_heads,
        SIZE=size,
        RMS=not is_layer,
        ROWS=rows,
        EARLY=num_rows <= EARLY_ROWS,
        BLOCK=block,
        num_warps=norm_warps(rows * block),
        **pdl_launch_options(q),
    )
    return outs[0], outs[1]


def _rows_of_cta(num_rows: int, size: int) -> int:
    """The rows of `size` features of a CTA, when there are `num_rows`."""
    return max(1, 2048 // next_power_of_2(size)) if num_rows >= 1024 else 1
