"""Dummy steps: steps of padding for capturing graphs, measuring memory and tracing kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.core.forward_batch import NO_TREE, ForwardBatch, VerifiedRows
from stoker.runtime.worker.inputs import InputBuilder, PackedStep, Shape, StepInputs, buffer_size, set_draft_inputs, split_buffer

ONE_LAUNCH_ROWS = 8  # of a captured step with prompts: attention of this many decodes as of prompts takes no longer than a second launch


@dataclass(frozen=True, slots=True)
class Bounds:
    """The properties of a step, besides its shape, by which kernels and tiles are selected."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    is_counted: bool = False  # on the device: the decodes (of more than ONE_LAUNCH_ROWS rows), and the rows without padding

    @staticmethod
    def of_graph(shape: Shape, max_seq_len: int) -> Bounds:
        """The bounds of a captured step. They must be valid for every step that is padded to its shape."""
        if shape.is_decode:
            return Bounds(shape.rows, 1, max_seq_len)
        if shape.max_drafts:
            return Bounds(0, shape.max_drafts + 1, max_seq_len)
        return Bounds(0, shape.tokens, max_seq_len, is_counted=True)


def static_buffer_size(max_tokens: int, max_rows: int, width: int) -> int:
    """The number of int32 elements of a buffer for the inputs of any padded step.

    It includes block tables of `width` columns, and for each row a copy of recurrent states before and after the step.
    """
    return buffer_size((*_sizes(Shape(max_tokens, max_rows, False, max_drafts=1)), max_rows * width, 2 * max_rows, 2 * max_rows))


def fill_dummy_step(
    static: Tensor, tables: Tensor, shape: Shape, bounds: Bounds, padding_row: int, *, has_trees: bool = False
) -> StepInputs:
    """Write a dummy step to the buffer `static` (int32), in the layout of InputBuilder. It stores no token and reads no key."""
    parts = split_buffer(static, _sizes(shape))
    values = (0, 0, -1, 0, 0, 0, padding_row, 0, 0, 0, padding_row, 0, 0, NO_TREE, padding_row, 0, 0, 0)
    for part, value in zip(parts, values, strict=True):
        part.fill_(value)
    batch = ForwardBatch(
        token_ids=parts[0],
        positions=parts[1],
        slots=parts[2],
        query_starts=parts[3],
        seq_lens=parts[4],
        block_tables=tables[: shape.rows],
        num_decodes=bounds.num_decodes,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        logits_idx=parts[5],
        state_slots=parts[14],
        decode_count=parts[15] if bounds.is_counted and shape.rows > ONE_LAUNCH_ROWS else None,
        row_count=parts[16] if bounds.is_counted else None,
        split_tokens=parts[17],
    )
    inputs = StepInputs(batch, parts[6], parts[7])
    if shape.max_drafts:
        batch.verified = VerifiedRows(shape.rows, shape.tokens, 1 + shape.max_drafts)
        set_draft_inputs(inputs, parts[8:14], has_trees=has_trees)
    return inputs


def allocate_dummy_step(
    shape: Shape, bounds: Bounds, width: int, padding_row: int, device: torch.device, *, is_prefix_lm: bool = False
) -> StepInputs:
    """A dummy step in newly allocated memory, with block tables of `width` zeros. Its decodes have one token each and read no key."""
    static = torch.zeros(buffer_size(_sizes(shape)), dtype=torch.int32, device=device)
    tables = torch.zeros(shape.rows, width, dtype=torch.int32, device=device)
    step = fill_dummy_step(static, tables, shape, bounds, padding_row)
    starts = step.batch.query_starts
    starts.copy_(torch.arange(len(starts), dtype=torch.int32, device=device).clamp(max=bounds.num_decodes))
    if is_prefix_lm:
        step.batch.block_positions = torch.zeros_like(step.batch.positions)
        step.batch.prefix_lens = torch.zeros_like(step.batch.seq_lens)
    return step


def pack_dummy_step(
    inputs: InputBuilder, shape: Shape, *, is_prefix_lm: bool = False, is_padded: bool = False, num_logits: int | None = None
) -> PackedStep:
    """A dummy step whose prompts lie within one block, in the form in which it is published to followers.

    `is_padded`: a captured graph runs it. `num_logits`: tokens whose logits are computed, by default one for each row.
    """
    num_logits = shape.rows if num_logits is None else num_logits
    packed = PackedStep(
        torch.empty(0), shape, width=1, num_logits=num_logits, num_sampled=num_logits, num_decodes=shape.rows if shape.is_decode else 0,
        max_query_len=shape.tokens, max_seq_len=inputs.block_size, is_padded=is_padded, sampled=[], is_prefix_lm=is_prefix_lm,
    )  # fmt: skip
    packed.host = inputs.buffer(packed.buffer_size)
    packed.host.zero_()
    parts = split_buffer(packed.host, packed.sizes)
    slots, rows, state_slots = parts[2], parts[6], parts[14]
    slots.fill_(-1)
    rows.fill_(inputs.num_rows)
    state_slots.fill_(inputs.num_rows)
    return packed


def _sizes(shape: Shape) -> tuple[int, ...]:
    """The sizes of the parts of a step's buffer, in int32 elements, without block tables."""
    tokens, rows = shape.tokens, shape.rows
    if shape.max_drafts:
        return (*[tokens] * 3, rows + 1, rows, *[tokens] * 3, rows + 1, tokens, rows, tokens, 2 * tokens, rows, rows, 1, 1, 1)
    return (*[tokens] * 3, rows + 1, *[rows] * 4, *[0] * 6, rows, 1, 1, 1)
