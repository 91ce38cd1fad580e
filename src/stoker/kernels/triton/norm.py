"""RMS norm and layer norm as one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

KINDS = ("rms", "layer")
MAX_SIZE = 1 << 16  # a row is held in the registers of one program


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """ROWS rows of SIZE features. Row r of x starts at (r // INNER) × stride_outer + (r % INNER) × stride_inner; `out` is dense."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows)[:, None] & (cols < SIZE)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = (rows // INNER * stride_outer + rows % INNER * stride_inner)[:, None] + cols
    wide = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        mean = tl.sum(wide, axis=1) / SIZE
        wide = tl.where(inside, wide - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    wide = wide * scale[:, None]
    if weight is not None:
        wide = wide * tl.load(weight + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
    if bias is not None:
        wide = wide + tl.load(bias + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * SIZE + cols, wide.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """See `ops.norm`. x [..., size]: dense, or a [T, heads, size] view (the heads of a fused projection)."""
    view = x if x.dim() == 3 and x.stride(-1) == 1 else x.contiguous().view(-1, 1, x.shape[-1])
    outer, inner, size = view.shape
    if kind not in KINDS:
        raise ValueError(f"norm kind {kind!r} is none of {', '.join(KINDS)}")
    if size > MAX_SIZE:
        raise ValueError(f"norm over {size} features; this kernel holds a row in registers and takes at most {MAX_SIZE}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = outer * inner
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block) if num_rows >= 1024 else 1
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        view, weight, bias if kind == "layer" else None, out, num_rows, view.stride(0), view.stride(1), eps,
        INNER=inner, SIZE=size, RMS=kind == "rms", ROWS=rows, BLOCK=block,
        num_warps=min(16, max(1, rows * block // 256)), **pdl_launch_options(x),
    )  # fmt: skip
    return out
