"""The end of a sum over two ranks: out = round(a + b) + residual [T, hidden], in one pass.

The sum of the ranks is rounded to the dtype of the summands first, so that results equal those of an all-reduce and a separate addition.

Grid: blocks of BLOCK elements. Theoretical floor: three reads and one write of each element at the speed of memory: 0.056 ms for 4,096
rows of 8,192 features in bfloat16 at 4.8 TB/s. Not measured by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.reference import summands as reference
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

BLOCK = 1024  # eight elements per thread of four warps: one 16-byte access per operand in bfloat16


@triton.jit
def add_summands_kernel(
    a_ptr,  # [count]
    b_ptr,  # [count]
    residual_ptr,  # [count]
    out_ptr,  # [count]
    count,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK sums."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    a = tl.load(a_ptr + index, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + index, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + index, mask=inside, other=0.0).to(tl.float32)
    total = (a + b).to(a_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + index, (total + residual).to(out_ptr.dtype.element_ty), mask=inside)


def add_summands(summands: tuple[Tensor, ...], residual: Tensor, out: Tensor) -> None:
    """out = the sum of one or two summands + residual (`ops.add_summands`). All tensors are contiguous."""
    if len(summands) == 1:
        reference.add_summands(summands, residual, out)
        return
    a, b = summands
    count = out.numel()
    add_summands_kernel[(cdiv(count, BLOCK),)](a, b, residual, out, count, BLOCK=BLOCK, num_warps=4, **pdl_launch_options(out))
