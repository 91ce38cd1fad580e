"""The positions and drafts of steps that are planned before the ids of earlier steps are known.

The device knows the tokens of each row (`RowTokens`): their number n, and the newest WIDTH of them in a ring, position p at p mod WIDTH.
A step that is planned while a step with drafts runs has positions that are too large by the number of drafts that are rejected:

    ahead        max(planned position of the row's first token - (n - 1), 0)          0 for prefills and for rows planned in time
    positions, lengths, counters   -= ahead;   slots = block_tables[position ÷ block_size] × block_size + position mod block_size

and its drafts are what followed the last earlier occurrence of the row's newest tokens. Runs of 5, 3 and 2 tokens are tried in this order:

    text    ... a b c d e │ f g h ... a b c d e        n tokens; the drafts are f, g, h ... and repeat from f after the end
                          p                     n

    continue_rows    grid: R rows of the step (positions and drafts), then S sequences that sample (counters)
    append_tokens    grid: S sequences                                    text[n ...] = yielded ids, n += their number

Theoretical floor: a row of 1,000 tokens reads 4 KB, so the launch itself; 32,768 tokens are 131 KB, read by one CTA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker.base.config import LOOKUP_SIZES
from stoker.core.forward_batch import ForwardBatch
from stoker.kernels.triton.integers import next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import RowTokens

_BLOCK = 1024  # positions of the text that a CTA compares per iteration
_NODES = 64  # tokens of a row with the largest number of drafts
_RANK = 1 << 16  # above every offset in the text, so that a longer run of equal tokens is preferred to a later one

_LONGEST = tl.constexpr(LOOKUP_SIZES[0])
_LONG = tl.constexpr(LOOKUP_SIZES[1])
_SHORT = tl.constexpr(LOOKUP_SIZES[2])


@triton.jit
def continuation(text_ptr, length, node, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr):
    """The ids that followed the last earlier occurrence of the newest of `length` tokens, for each `node`; without any, the newest id."""
    begin = tl.maximum(length - WIDTH, 0)  # the first position in the ring
    best = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(begin, length, BLOCK):
        at = block + tl.arange(0, BLOCK)  # the position after a run
        equal = at < length
        size = tl.zeros([BLOCK], dtype=tl.int32)
        for i in tl.static_range(_LONGEST):
            newest = tl.load(text_ptr + (length - 1 - i) % WIDTH, mask=length - 1 - i >= begin, other=-2)
            ids = tl.load(text_ptr + (at - 1 - i) % WIDTH, mask=equal & (at - 1 - i >= begin), other=-1)
            equal = equal & (ids == newest)
            size += equal.to(tl.int32)
        rank = (size >= _SHORT).to(tl.int32) + (size >= _LONG).to(tl.int32) + (size >= _LONGEST).to(tl.int32)
        best = tl.maximum(best, tl.where(rank > 0, rank * RANK + at - begin, 0))
    found = tl.max(best, 0)
    source = tl.where(found > 0, begin + found % RANK, length - 1)
    return tl.load(text_ptr + (source + node % (length - source)) % WIDTH)


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def continue_rows_kernel(
    # The step, changed in place
    token_ids_ptr,  # int32 [T]
    positions_ptr,  # int32 [T]
    slots_ptr,  # int32 [T]
    query_starts_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    tables_ptr,  # int32 [R, stride_table]
    device_rows_ptr,  # int32 [R]: the row of the device buffers
    # Sequences that sample
    rows_ptr,  # int32 [S]: the row of the device buffers
    starts_ptr,  # int32 [S + 1]: the first counter of each; not read without HAS_STARTS: each has one
    counters_ptr,  # int32 [L], changed in place
    # Known tokens
    lengths_ptr,  # int32 [rows of the device buffers]
    text_ptr,  # int32 [rows of the device buffers, WIDTH]; not read if WIDTH is 0
    # Sizes
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    RANK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: one row of the step, or the counters of one sequence."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    program = tl.program_id(0)
    node = tl.arange(0, NODES)
    if program >= num_rows:
        sequence = program - num_rows
        first = sequence
        end = sequence + 1
        if HAS_STARTS:
            first = tl.load(starts_ptr + sequence)
            end = tl.load(starts_ptr + sequence + 1)
        exists = first + node < end
        counters = tl.load(counters_ptr + first + node, mask=exists, other=0)
        planned = tl.max(tl.where(node == 0, counters, 0), 0)
        ahead = tl.maximum(planned - tl.load(lengths_ptr + tl.load(rows_ptr + sequence)), 0)
        tl.store(counters_ptr + first + node, counters - ahead, mask=exists)
    else:
        first = tl.load(query_starts_ptr + program)
        count = tl.load(query_starts_ptr + program + 1) - first
        planned = tl.load(seq_lens_ptr + program)
        row = tl.load(device_rows_ptr + program).to(tl.int64)
        length = tl.load(lengths_ptr + row)
        ahead = tl.maximum(planned - count - length + 1, 0)
        if ahead > 0:  # a row with one token or with drafts
            exists = node < count
            positions = tl.load(positions_ptr + first + node, mask=exists, other=0) - ahead
            blocks = tl.load(tables_ptr + program.to(tl.int64) * stride_table + positions // BLOCK_SIZE, mask=exists, other=0)
            tl.store(positions_ptr + first + node, positions, mask=exists)
            tl.store(slots_ptr + first + node, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, mask=exists)
            tl.store(seq_lens_ptr + program, planned - ahead)
        if WIDTH > 0:
            second = tl.load(token_ids_ptr + first + 1, mask=count > 1, other=0)
            if second < 0:
                drafts = continuation(text_ptr + row * WIDTH, length, node, WIDTH, BLOCK, RANK)
                tl.store(token_ids_ptr + first + 1 + node, drafts, mask=node < count - 1)


def continue_rows(batch: ForwardBatch, rows: Tensor, starts: Tensor | None, counters: Tensor, known: RowTokens, block_size: int) -> None:
    """Correct the positions of a step, and find its drafts (`ops.continue_rows`), in one launch."""
    assert batch.state_slots is not None
    continue_rows_kernel[(batch.num_rows + len(rows),)](
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_starts,
        batch.seq_lens,
        batch.block_tables,
        batch.state_slots,
        rows,
        rows if starts is None else starts,
        counters,
        known.lengths,
        known.lengths if known.text is None else known.text,
        batch.num_rows,
        batch.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=0 if known.text is None else known.text.shape[1],
        HAS_STARTS=starts is not None,
        BLOCK=_BLOCK,
        NODES=_NODES,
        RANK=_RANK,
        num_warps=4,
        **pdl_launch_options(batch.token_ids),
    )


@triton.jit(do_not_specialize=["padding_row"])
def append_tokens_kernel(
    rows_ptr,  # int32 [S]: the row of the device buffers
    token_ids_ptr,  # int32 [S, COLUMNS]
    accepted_ptr,  # int32 [S]; not read without HAS_DRAFTS: each sequence yields one id
    lengths_ptr,  # int32 [rows of the device buffers]
    text_ptr,  # int32 [rows of the device buffers, WIDTH]; not written if WIDTH is 0
    padding_row,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    NODES: tl.constexpr,  # COLUMNS, rounded up to a power of two
    USE_PDL: tl.constexpr,
):
    """One CTA: the ids that one sequence yields."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    sequence = tl.program_id(0)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    if row < padding_row:
        count = 1
        if HAS_DRAFTS:
            count = tl.load(accepted_ptr + sequence) + 1
        length = tl.load(lengths_ptr + row)
        if WIDTH > 0:
            node = tl.arange(0, NODES)
            ids = tl.load(token_ids_ptr + sequence * COLUMNS + node, mask=node < count, other=0)
            tl.store(text_ptr + row * WIDTH + (length + node) % WIDTH, tl.maximum(ids, 0), mask=node < count)
        tl.store(lengths_ptr + row, length + count)


def append_tokens(known: RowTokens, rows: Tensor, token_ids: Tensor, num_accepted: Tensor | None) -> None:
    """Add what a step yields to the tokens of its rows (`ops.append_tokens`), in one launch."""
    if len(rows):
        columns = token_ids.shape[1]
        append_tokens_kernel[(len(rows),)](
            rows,
            token_ids,
            rows if num_accepted is None else num_accepted,
            known.lengths,
            known.lengths if known.text is None else known.text,
            len(known.lengths) - 1,
            COLUMNS=columns,
            WIDTH=0 if known.text is None else known.text.shape[1],
            HAS_DRAFTS=num_accepted is not None,
            NODES=next_power_of_2(columns),
            num_warps=1,
            **pdl_launch_options(token_ids),
        )
