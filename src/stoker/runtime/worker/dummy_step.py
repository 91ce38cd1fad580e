"""Steps without requests: what is captured, measured and compiled ahead before there are any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.worker.inputs import InputBuilder, Packed, Shape, StepInputs, cut, num_places


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a launch is shaped by, besides the step's shape."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @staticmethod
    def of_graph(shape: Shape, max_seq_len: int) -> Bounds:
        """Those of a captured step, which must serve every step that is padded to its shape."""
        return Bounds(shape.rows, 1, max_seq_len) if shape.is_decode else Bounds(0, shape.tokens, max_seq_len)


def static_buffer_size(max_tokens: int, max_rows: int, width: int) -> int:
    """int32 of a buffer that holds the parts of any padded step."""
    return num_places((*_sizes(Shape(max_tokens, max_rows, False)), max_rows * width))


def fill_dummy_step(static: Tensor, tables: Tensor, shape: Shape, bounds: Bounds, padding_row: int) -> StepInputs:
    """A step of padding only, laid out in `static` int32 as InputBuilder fills it: no token is stored, no key read."""
    parts = cut(static, _sizes(shape))
    for part, value in zip(parts, (0, 0, -1, 0, 0, 0, padding_row, 0), strict=True):
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
    )
    return StepInputs(batch, parts[6], parts[7])


def allocate_dummy_step(
    shape: Shape, bounds: Bounds, width: int, padding_row: int, device: torch.device, *, is_prefix_lm: bool = False
) -> StepInputs:
    """A blank step in memory of its own, with block tables of `width` zeros. Its decodes have a token each, which sees no key."""
    static = torch.zeros(num_places(_sizes(shape)), dtype=torch.int32, device=device)
    tables = torch.zeros(shape.rows, width, dtype=torch.int32, device=device)
    step = fill_dummy_step(static, tables, shape, bounds, padding_row)
    starts = step.batch.query_starts
    starts.copy_(torch.arange(len(starts), dtype=torch.int32, device=device).clamp(max=bounds.num_decodes))
    if is_prefix_lm:
        step.batch.block_positions = torch.zeros_like(step.batch.positions)
        step.batch.prefix_lens = torch.zeros_like(step.batch.seq_lens)
    return step


def pack_dummy_step(inputs: InputBuilder, shape: Shape, *, is_prefix_lm: bool = False) -> Packed:
    """A blank step of one block's prompts, as the ranks are told of it."""
    packed = Packed(
        torch.empty(0), shape, width=1, num_logits=shape.rows, num_sampled=shape.rows, num_decodes=0, max_query_len=shape.tokens,
        max_seq_len=inputs.block_size, is_padded=False, sampled=[], is_prefix_lm=is_prefix_lm,
    )  # fmt: skip
    packed.host = inputs.buffer(packed.num_places)
    packed.host.zero_()
    _, _, slots, _, _, _, rows, *_ = cut(packed.host, packed.sizes)
    slots.fill_(-1)
    rows.fill_(inputs.num_rows)
    return packed


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (*[shape.tokens] * 3, shape.rows + 1, *[shape.rows] * 4)
