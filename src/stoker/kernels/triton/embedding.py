"""Embedding lookup, and the token ids of overlapped steps.

With overlapped scheduling, step N + 1 is launched before the token ids that step N samples are known to the host. They stay on the device
in `last_ids`, one per row of the device buffers: `resolve` replaces references to them by the ids, and `remember` stores new ones.

    embedding    out[t] = table[token_ids[t]]                        grid: tokens × blocks of BLOCK features
    resolve      out[t] = token_ids[t] if >= 0 else last_ids[-1 - token_ids[t]]
    remember     last_ids[rows[i]] = max(token_ids[i], 0)            grids: blocks of 1,024 ids

Theoretical floor: one read and one write of each row. For the tokens of a decode step, the launch itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait


@triton.jit(do_not_specialize=["vocab_size"])
def embedding_kernel(
    token_ids_ptr,  # int32 [T]
    table_ptr,  # [vocab_size, SIZE]
    out_ptr,  # [T, SIZE], dense
    vocab_size,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK features of one token. `stride_row` is that of the table, in elements. Unknown ids give zeros."""
    token = tl.program_id(0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    is_known = (row >= 0) & (row < vocab_size)
    features = tl.load(table_ptr + row * stride_row + cols, mask=inside & is_known, other=0.0)
    tl.store(out_ptr + token * SIZE + cols, features, mask=inside)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` for `token_ids` (`ops.embedding`). An unknown id gives zeros, because a kernel cannot raise an error."""
    size = table.shape[1]
    out = torch.empty((*token_ids.shape, size), dtype=table.dtype, device=table.device)
    if out.numel():
        block = min(2048, next_power_of_2(size))
        grid = (token_ids.numel(), cdiv(size, block))
        embedding_kernel[grid](
            token_ids.contiguous(),
            table,
            out,
            table.shape[0],
            table.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
            **pdl_launch_options(table),
        )
    return out


@triton.jit
def resolve_kernel(token_ids_ptr, last_ids_ptr, out_ptr, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One CTA: BLOCK of `count` token ids. A negative id -1 - r is replaced by last_ids[r]."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < count
    ids = tl.load(token_ids_ptr + t, mask=inside, other=0)
    is_pending = ids < 0
    last = tl.load(last_ids_ptr + tl.where(is_pending, -1 - ids, 0), mask=inside & is_pending, other=0)
    tl.store(out_ptr + t, tl.where(is_pending, last, ids), mask=inside)


def resolve(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """Replace references to tokens that are still on the device (`ops.resolve`)."""
    out = torch.empty_like(token_ids)
    count = token_ids.shape[0]
    if count:
        grid = (cdiv(count, 1024),)
        resolve_kernel[grid](token_ids, last_ids, out, count, BLOCK=1024, num_warps=4, **pdl_launch_options(token_ids))
    return out


@triton.jit
def remember_kernel(last_ids_ptr, rows_ptr, token_ids_ptr, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One CTA: store BLOCK of `count` sampled ids in `last_ids`, at their rows."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    ids = tl.load(token_ids_ptr + i, mask=inside, other=0)
    tl.store(last_ids_ptr + tl.load(rows_ptr + i, mask=inside, other=0), tl.maximum(ids, 0), mask=inside)


def remember(last_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Store the sampled token of each row for the next step's `resolve` (`ops.remember`)."""
    count = token_ids.shape[0]
    if count:
        grid = (cdiv(count, 1024),)
        remember_kernel[grid](last_ids, rows, token_ids, count, BLOCK=1024, num_warps=4, **pdl_launch_options(token_ids))
