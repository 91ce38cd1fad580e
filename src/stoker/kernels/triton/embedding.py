"""Embedding lookup: one program copies a piece of a table row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait


@triton.jit(do_not_specialize=["vocab_size"])
def embedding_kernel(token_ids, table, out, vocab_size, stride_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.load(token_ids + token).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    known = (row >= 0) & (row < vocab_size)
    features = tl.load(table + row * stride_row + cols, mask=inside & known, other=0.0)
    tl.store(out + token * SIZE + cols, features, mask=inside)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """See `ops.embedding`. An id outside the table gives zeros: a device cannot raise, and must not read past its memory."""
    size = table.shape[1]
    out = torch.empty((*token_ids.shape, size), dtype=table.dtype, device=table.device)
    if out.numel():
        block = min(2048, triton.next_power_of_2(size))
        grid = (token_ids.numel(), triton.cdiv(size, block))
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
def resolve_kernel(token_ids, last_ids, out, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    ids = tl.load(token_ids + at, mask=inside, other=0)
    pending = ids < 0
    newest = tl.load(last_ids + tl.where(pending, -1 - ids, 0), mask=inside & pending, other=0)
    tl.store(out + at, tl.where(pending, newest, ids), mask=inside)


def resolve(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """See `ops.resolve`."""
    out = torch.empty_like(token_ids)
    count = token_ids.shape[0]
    if count:
        resolve_kernel[(triton.cdiv(count, 1024),)](
            token_ids, last_ids, out, count, BLOCK=1024, num_warps=4, **pdl_launch_options(token_ids)
        )
    return out


@triton.jit
def remember_kernel(last_ids, rows, token_ids, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    ids = tl.load(token_ids + at, mask=inside, other=0)
    tl.store(last_ids + tl.load(rows + at, mask=inside, other=0), tl.maximum(ids, 0), mask=inside)


def remember(last_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """See `ops.remember`."""
    count = token_ids.shape[0]
    if count:
        remember_kernel[(triton.cdiv(count, 1024),)](
            last_ids, rows, token_ids, count, BLOCK=1024, num_warps=4, **pdl_launch_options(token_ids)
        )
