"""Records that the leader publishes to its followers: a step, blocks to zero, the start or end of a profile, or the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from stoker.runtime.worker.inputs import PackedStep, Shape, buffer_size
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE, Numbers

STEP, ZERO_BLOCKS, END, PROFILE = 1, 2, 3, 4


class Record(NamedTuple):
    """A decoded record. `packed` and `all_greedy` are those of a STEP, `blocks` those of ZERO_BLOCKS, `profile` that of PROFILE."""

    kind: int
    packed: PackedStep | None
    all_greedy: bool
    blocks: list[int]
    profile: tuple[int, int, bool] = (0, 0, False)  # the process id of the leader, the number, and whether it starts


def max_step_size(max_num_tokens: int, max_rows: int, max_blocks: int) -> int:
    """The largest number of int32 values of a step: nine per token, eight per row, and the block tables."""
    return buffer_size((*[max(max_num_tokens, max_rows)] * 9, max_rows + 1, max_rows + 1, *[max_rows] * 6, max_rows * max_blocks))


def encode_step(packed: PackedStep, all_greedy: bool) -> tuple[int, ...]:
    """The header of a step's record. The record's numbers are `packed.host`."""
    shape = packed.shape
    return (
        STEP, shape.tokens, shape.rows, shape.is_decode, packed.width, packed.num_logits, packed.num_sampled, packed.num_decodes,
        packed.max_query_len, packed.max_seq_len, packed.max_drafts, packed.num_sequences, packed.is_padded, all_greedy,
        packed.is_prefix_lm, packed.has_adapters, packed.num_restores, packed.num_saves,
    )  # fmt: skip


def decode_record(record: Numbers, buffer: Callable[[int], torch.Tensor]) -> Record:
    """A copy of a record's content. The numbers of a step are copied to `buffer(size)`, int32 [size]."""
    kind, *fields = (int(value) for value in record[:18])
    if kind == ZERO_BLOCKS:
        return Record(kind, None, False, record[HEADER_SIZE : HEADER_SIZE + fields[0]].tolist())
    if kind == PROFILE:
        return Record(kind, None, False, [], (fields[0], fields[1], bool(fields[2])))
    if kind != STEP:
        return Record(kind, None, False, [])
    *sizes, is_padded, all_greedy, is_prefix_lm, has_adapters, num_restores, num_saves = fields
    tokens, rows, is_decode, width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len, max_drafts, num_sequences = sizes
    # A padded step is that of a graph, which is captured for a number of drafts.
    shape = Shape(tokens, rows, bool(is_decode), max_drafts if is_padded else 0)
    packed = PackedStep(
        torch.empty(0), shape, width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len, bool(is_padded), [],
        is_prefix_lm=bool(is_prefix_lm), has_adapters=bool(has_adapters), max_drafts=max_drafts, num_sequences=num_sequences,
        num_restores=num_restores, num_saves=num_saves,
    )  # fmt: skip
    size = packed.buffer_size
    packed.host = buffer(size)
    packed.host.numpy()[:] = record[HEADER_SIZE : HEADER_SIZE + size]
    return Record(kind, packed, bool(all_greedy), [])
