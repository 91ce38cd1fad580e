"""Records that the leader publishes to its followers: a step, blocks to zero, a part of the capture of a step, a profile, or the end.

A step of several data-parallel ranks is one record of kind PARTS: the header of each rank's step, and then the numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from stoker.core.forward_batch import VerifiedRows
from stoker.runtime.schedule.planner import max_sampled_tokens
from stoker.runtime.worker.inputs import PackedStep, Shape, buffer_size
from stoker.runtime.worker.parallel_inputs import with_counts
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE, Numbers

STEP, ZERO_BLOCKS, END, PROFILE, PARTS, CAPTURE = 1, 2, 3, 4, 5, 6
_STEP_FIELDS = 21  # the number of values that encode_step returns


class Record(NamedTuple):
    """A decoded record.

    `packed` and `all_greedy` are those of a STEP, `blocks` those of ZERO_BLOCKS, `profile` that of PROFILE, `shape` that of CAPTURE.
    """

    kind: int
    packed: PackedStep | None
    all_greedy: bool
    blocks: list[int]
    profile: tuple[int, int, bool] = (0, 0, False)  # the process id of the leader, the number, and whether it starts
    shape: Shape | None = None


def max_step_size(max_num_tokens: int, max_rows: int, max_blocks: int, data_parallel: int = 1) -> int:
    """The largest number of int32 values of a step: for each rank 12 per token, 9 per row, counts, block tables, moves, and a header."""
    return data_parallel * (_STEP_FIELDS + _max_part_size(max_num_tokens, max_rows, max_blocks))


def _max_part_size(max_num_tokens: int, max_rows: int, max_blocks: int) -> int:
    """The largest number of int32 values of the step of one rank."""
    tokens, moves = max(max_num_tokens, max_rows), 16 * max_sampled_tokens(max_rows)
    return buffer_size((*[tokens] * 10, 2 * tokens, max_rows + 1, max_rows + 1, *[max_rows] * 7, 1, 1, 1, max_rows * max_blocks, moves))


def encode_step(packed: PackedStep, all_greedy: bool) -> tuple[int, ...]:
    """The header of a step's record. The record's numbers are `packed.host`."""
    shape = packed.shape
    return (
        STEP, shape.tokens, shape.rows, shape.is_decode, packed.width, packed.num_logits, packed.num_sampled, packed.num_decodes,
        packed.max_query_len, packed.max_seq_len, packed.max_drafts, packed.num_sequences, *_verified_sizes(packed), packed.is_padded,
        all_greedy, packed.is_prefix_lm, packed.has_adapters, packed.num_restores, packed.num_saves, packed.num_moves,
    )  # fmt: skip


def _verified_sizes(packed: PackedStep) -> tuple[int, int]:
    """The numbers of rows and of tokens that verify drafts."""
    return (0, 0) if packed.verified is None else (packed.verified.num_rows, packed.verified.num_tokens)


def encode_capture(shape: Shape) -> tuple[int, ...]:
    """The header of the record of a part of the capture of a shape. The record has no numbers."""
    return CAPTURE, shape.tokens, shape.rows, shape.is_decode, shape.max_drafts


def encode_parts(packed: list[PackedStep], all_greedy: bool) -> tuple[tuple[int, ...], Numbers]:
    """(header, numbers) of the record of a step of several data-parallel ranks. `packed` has the step of each."""
    headers = [np.array(encode_step(step, all_greedy), dtype=np.int32) for step in packed]
    return (PARTS, len(packed)), np.concatenate([*headers, *(step.host.numpy() for step in packed)])


def decode_record(record: Numbers, buffer: Callable[[int], torch.Tensor], rank: int = 0) -> Record:
    """A copy of a record's content for `rank`. The numbers of a step are copied to `buffer(size)`, int32 [size]."""
    kind, *fields = (int(value) for value in record[:_STEP_FIELDS])
    if kind == PARTS:
        return _decode_part(record, buffer, rank, fields[0])
    if kind == ZERO_BLOCKS:
        return Record(kind, None, False, record[HEADER_SIZE : HEADER_SIZE + fields[0]].tolist())
    if kind == PROFILE:
        return Record(kind, None, False, [], (fields[0], fields[1], bool(fields[2])))
    if kind == CAPTURE:
        return Record(kind, None, False, [], shape=Shape(fields[0], fields[1], bool(fields[2]), fields[3]))
    if kind != STEP:
        return Record(kind, None, False, [])
    packed, all_greedy = _decode_step(fields)
    _copy_numbers(packed, record[HEADER_SIZE:], buffer)
    return Record(kind, packed, all_greedy, [])


def _decode_part(record: Numbers, buffer: Callable[[int], torch.Tensor], rank: int, num_ranks: int) -> Record:
    """The step of `rank` in a record of kind PARTS."""
    headers, numbers = np.split(record[HEADER_SIZE:], [num_ranks * _STEP_FIELDS])
    decoded = [_decode_step([int(value) for value in header[1:]]) for header in headers.reshape(num_ranks, _STEP_FIELDS)]
    steps = with_counts([packed for packed, _ in decoded])
    packed, all_greedy = decoded[rank]
    _copy_numbers(packed, numbers[sum(step.buffer_size for step in steps[:rank]) :], buffer)
    return Record(STEP, packed, all_greedy, [])


def _decode_step(fields: list[int]) -> tuple[PackedStep, bool]:
    """(step without its numbers, all_greedy), from the header of a step after its kind."""
    *sizes, num_verified, verified_tokens, is_padded, all_greedy, is_prefix_lm, has_adapters, num_restores, num_saves, num_moves = fields
    tokens, rows, is_decode, width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len, max_drafts, num_sequences = sizes
    # A padded step is that of a graph, which is captured for a number of drafts.
    shape = Shape(tokens, rows, bool(is_decode), max_drafts if is_padded else 0)
    packed = PackedStep(
        torch.empty(0), shape, width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len, bool(is_padded), [],
        is_prefix_lm=bool(is_prefix_lm), has_adapters=bool(has_adapters), max_drafts=max_drafts, num_sequences=num_sequences,
        verified=VerifiedRows(num_verified, verified_tokens, 1 + max_drafts) if num_verified else None,
        num_restores=num_restores, num_saves=num_saves, num_moves=num_moves,
    )  # fmt: skip
    return packed, bool(all_greedy)


def _copy_numbers(packed: PackedStep, numbers: Numbers, buffer: Callable[[int], torch.Tensor]) -> None:
    """Copy the numbers of a step, which are the first of `numbers`, to a buffer."""
    size = packed.buffer_size
    packed.host = buffer(size)
    packed.host.numpy()[:] = numbers[:size]
