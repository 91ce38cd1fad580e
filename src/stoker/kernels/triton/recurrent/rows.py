"""What the kernels of recurrent states have in common: the row of a CTA, and functions that Triton lacks.

A launch has one CTA per row and part of its state. The CTA passes over the tokens of its row in order, because each state depends on the
one before. Decode rows have one token; they have a launch of their own, without loops. So have the rows that verify drafts. In a
captured step with prompts, each launch has CTAs for all rows: the numbers of decodes and of rows are on the device.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch


class LaunchRows(NamedTuple):
    """Runtime: the rows of a launch, from `first_row` of the step on."""

    query_starts_ptr: Tensor  # int32 [R + 1]
    seq_lens_ptr: Tensor  # int32 [R]
    slots_ptr: Tensor  # int32 [R]
    first_row: int
    first_row_ptr: Tensor | None = None  # int32 [1], replaces first_row, or None
    end_ptr: Tensor | None = None  # int32 [1], the row after the last one; None: all CTAs have rows


@triton.jit
def row_of(rows, index):
    """The row of the step that is row `index` of the launch; -1 if there is none, because the grid of a captured step has all rows."""
    row = rows.first_row + index
    if rows.first_row_ptr is not None:
        row = tl.load(rows.first_row_ptr) + index
    if rows.end_ptr is not None:
        row = tl.where(row < tl.load(rows.end_ptr), row, -1)
    return row


@triton.jit
def row_tokens(rows, row, DECODE: tl.constexpr):
    """(first token, number of tokens, slot, whether its sequence begins) of a row of the step."""
    first = tl.load(rows.query_starts_ptr + row)
    count = 1
    if not DECODE:
        count = tl.load(rows.query_starts_ptr + row + 1) - first
    is_new = tl.load(rows.seq_lens_ptr + row) <= count
    return first.to(tl.int64), count, tl.load(rows.slots_ptr + row).to(tl.int64), is_new


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with a relative error of float32 also where exp(x) is small."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + y
    # log1p(y) = log(u) × y / (u - 1): the rounding errors of u cancel.
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


class ChunkTile(NamedTuple):
    """The work of a CTA of a prefill kernel at a time."""

    tokens: int  # of a chunk
    features: int  # of a head
    precision: str  # of the products
    num_warps: int


def chunk_tile(x: Tensor) -> ChunkTile:
    """The tile for inputs of x's dtype: the largest one whose kernels spill no more than a few registers (tests/kernels/compiled).

    TF32 rounds operands to 11 bits, which is as fine as float16 inputs are, and finer than bfloat16. Float32 inputs need three products
    each ("tf32x3"), whose operands take twice the registers and shared memory.
    """
    return ChunkTile(16, 32, "tf32x3", 4) if x.dtype == torch.float32 else ChunkTile(32, 64, "tf32", 8)


class Mode(Enum):
    """How the rows of a launch are computed."""

    DECODE = "decode"  # one token each
    VERIFY = "verify"  # several tokens each; the state after each token is stored in its slot, and that of the row is not replaced
    PREFILL = "prefill"


def launches(batch: ForwardBatch) -> list[tuple[LaunchRows, int, Mode]]:
    """(rows, their number, how they are computed) of the launches of a step. The batch must have `state_slots`."""
    assert batch.state_slots is not None, "the model has recurrent states, and the step names no slots"
    tensors = batch.query_starts, batch.seq_lens, batch.state_slots
    if batch.row_count is not None:
        prompts = LaunchRows(*tensors, 0, batch.decode_count, batch.row_count), batch.num_rows, Mode.PREFILL
        decodes = LaunchRows(*tensors, 0, None, batch.decode_count), batch.num_rows, Mode.DECODE
        return [prompts] if batch.decode_count is None else [decodes, prompts]
    num_decodes, num_verified = batch.num_decodes, batch.verified.num_rows if batch.verified is not None else 0
    counts = (num_decodes, num_verified, batch.num_rows - num_decodes - num_verified)
    parts = zip((0, num_decodes, num_decodes + num_verified), counts, Mode, strict=True)
    return [(LaunchRows(*tensors, first), count, mode) for first, count, mode in parts if count]
