"""Kernels of a step overlap at their edges (programmatic dependent launch, sm_90).

A kernel lets its successor's programs start as soon as all of its own have started; they fetch what doesn't depend on it (weights)
and then wait until it has finished. Every kernel launched with `chained` must call `wait_for_previous` before it reads or writes
anything that an earlier kernel of the step wrote or reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def chained(x: Tensor) -> dict[str, Any]:
    """Launch options for a kernel with a CHAINED parameter, for tensors on x's device."""
    if x.is_cpu or (x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 9):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def let_next_start(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()


@triton.jit
def prefetch_rows(rows, NUM_BYTES: tl.constexpr, CHAINED: tl.constexpr):
    """Ask for the first NUM_BYTES of each row ([N] pointers) in the L2 cache, a line of 128 bytes at a time."""
    if CHAINED:
        LINES: tl.constexpr = NUM_BYTES // 128
        lines = rows.to(tl.int64)[:, None] + (tl.arange(0, LINES) * 128)[None, :]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)
