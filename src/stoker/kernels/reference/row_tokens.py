"""The positions and drafts of steps that are planned before the ids of earlier steps are known, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.config import LOOKUP_SIZES
from stoker.core.forward_batch import ForwardBatch
from stoker.kernels.types import RowTokens


def continue_rows(batch: ForwardBatch, rows: Tensor, starts: Tensor | None, counters: Tensor, known: RowTokens, block_size: int) -> None:
    """Correct the positions of a step, and find its drafts (`ops.continue_rows`)."""
    assert batch.state_slots is not None
    slots, query_starts, num_tokens = batch.state_slots.long(), batch.query_starts.long(), batch.num_tokens
    counts = query_starts.diff()
    ahead = (batch.seq_lens - counts - known.lengths[slots] + 1).clamp(min=0).to(torch.int32)
    tokens = torch.arange(num_tokens, device=slots.device)
    owners = (torch.searchsorted(query_starts, tokens, right=True) - 1).clamp(max=batch.num_rows - 1)
    shifts = torch.where(tokens < query_starts[-1], ahead[owners], 0)
    positions = batch.positions - shifts
    blocks = batch.block_tables[owners].gather(1, (positions // block_size).long().unsqueeze(1)).squeeze(1)
    batch.slots.copy_(torch.where(shifts > 0, blocks * block_size + positions % block_size, batch.slots))
    batch.positions.copy_(positions)
    batch.seq_lens.sub_(ahead)
    firsts = torch.arange(len(rows) + 1, device=slots.device) if starts is None else starts.long()
    early = (counters[firsts[:-1].clamp(max=len(counters) - 1)] - known.lengths[rows.long()]).clamp(min=0)
    counters[firsts[0] : firsts[-1]] -= early.repeat_interleave(firsts.diff())
    if known.text is None:
        return
    for slot, first, count in zip(slots.tolist(), query_starts.tolist(), counts.tolist(), strict=False):
        if count > 1 and batch.token_ids[first + 1] < 0:
            drafts = _continuation(known.text[slot], int(known.lengths[slot]), count - 1)
            batch.token_ids[first + 1 : first + count] = torch.tensor(drafts, dtype=batch.token_ids.dtype)


def append_tokens(known: RowTokens, rows: Tensor, token_ids: Tensor, num_accepted: Tensor | None) -> None:
    """Add what a step yields to the tokens of its rows (`ops.append_tokens`)."""
    counts = [1] * len(rows) if num_accepted is None else (num_accepted + 1).tolist()
    for row, ids, count in zip(rows.tolist(), token_ids.clamp(min=0), counts, strict=True):
        if row < len(known.lengths) - 1:
            length = int(known.lengths[row])
            known.lengths[row] = length + count
            if known.text is not None:
                known.text[row, torch.arange(length, length + count) % known.text.shape[1]] = ids[:count]


def _continuation(text: Tensor, length: int, count: int) -> list[int]:
    """`count` ids that may follow the `length` tokens of a row, whose newest ones are in the ring `text`."""
    width = len(text)
    begin = max(length - width, 0)
    ids = [int(text[at % width]) for at in range(begin, length)]
    for size in LOOKUP_SIZES:
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[len(ids) - size :]:
                return [ids[end + i % (len(ids) - end)] for i in range(count)]
    return ids[-1:] * count
