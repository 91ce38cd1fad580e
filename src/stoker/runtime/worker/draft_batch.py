"""The first batch of a draft engine: the tokens of a step with the newest tokens, which are the roots of the drafts.

A draft engine has the block tables of the model, and its cache has the same blocks: the key of a token is in the slot with the same number.
Prefix reuse, preemption and the release of rejected drafts therefore need no bookkeeping of their own. The positions of drafts may lie
behind the last block of a sequence. Their keys are stored in spare blocks, which belong to a row of the device buffers, and which only the
caches of the draft engine have. Once the model has verified such drafts, the next step computes them again in the blocks of the sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.draft_trees.level_drafts import DraftStep
from stoker.runtime.worker.accepted_batch import AcceptedBatch
from stoker.runtime.worker.drafter import DraftInputs


def num_spare_blocks(num_drafts: int, block_size: int) -> int:
    """The number of spare blocks of a row: its newest token and its drafts may all lie behind its last block."""
    return -(-(num_drafts + 1) // block_size)


class SpareBlocks:
    """The spare blocks of `num_rows` rows and of the padding. They follow the `num_blocks` blocks of the model's caches."""

    def __init__(self, num_blocks: int, num_rows: int, num_drafts: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.padding_row = block_size, num_rows
        count = num_spare_blocks(num_drafts, block_size)
        blocks = torch.arange((num_rows + 1) * count, dtype=torch.int32, device=device) + num_blocks
        self.blocks = blocks.view(num_rows + 1, count)

    def first_pass(self, inputs: DraftInputs, accepted: AcceptedBatch, limit: int) -> tuple[ForwardBatch, DraftStep]:
        """The batch of T + S tokens for a step of T tokens, with the newest token of each of S sequences after its last valid one.

        Its logits are those of the newest tokens. `limit` is the number of positions of the draft engine.
        """
        batch, rows, last = accepted.batch, inputs.rows.long(), accepted.last.long()
        starts, device = batch.query_starts.long(), rows.device
        num_tokens, num_rows, num_sequences = batch.num_tokens, batch.num_rows, len(rows)
        sequences = torch.arange(num_sequences, device=device)
        is_real = rows != self.padding_row
        owners = torch.where(is_real, torch.searchsorted(starts, last, right=True) - 1, num_rows)  # the row of the batch; padding: R
        # Values by row of the batch; the last element is for padding.
        grows = torch.zeros(num_rows + 1, dtype=torch.int64, device=device).index_put_((owners,), is_real.long())
        num_before = grows.cumsum(0) - grows
        last_valid = torch.full((num_rows + 1,), num_tokens, device=device).index_put_((owners,), torch.where(is_real, last, num_tokens))
        buffer_rows = torch.full((num_rows + 1,), self.padding_row, device=device).index_put_((owners,), rows)
        # Each token moves behind the newest tokens of earlier rows; rejected drafts also move behind that of their own row.
        tokens = torch.arange(num_tokens, device=device)
        row_of = torch.searchsorted(starts, tokens, right=True) - 1
        shift = (tokens > last_valid[row_of]).long()
        moved = tokens + num_before[row_of] + shift
        newest_at = torch.where(is_real, last + 1 + num_before[owners], num_tokens + sequences)

        def merged(old: Tensor, new: Tensor) -> Tensor:
            """[T + S]: the values of the tokens of the step, and of the newest tokens."""
            return (
                torch.empty(num_tokens + num_sequences, dtype=old.dtype, device=device).scatter_(0, moved, old).scatter_(0, newest_at, new)
            )

        positions = batch.positions.to(torch.int32)
        newest_positions = (positions.index_select(0, last) + 1).clamp(max=limit - 1)
        all_positions = merged((positions + shift.to(torch.int32)).clamp(max=limit - 1), newest_positions)
        all_rows = merged(row_of, owners).clamp(max=num_rows - 1)
        tables = self._tables(batch, buffer_rows[:-1])
        first = replace(
            batch,
            token_ids=merged(batch.token_ids.to(torch.int32), inputs.newest.clamp(min=0)),
            positions=all_positions,
            slots=_slots(tables.index_select(0, all_rows), all_positions, merged(batch.slots >= 0, is_real), self.block_size),
            query_starts=torch.cat((batch.query_starts[:1], batch.query_starts[1:] + (num_before + grows)[:-1].to(torch.int32))),
            seq_lens=(batch.seq_lens + grows[:-1].to(torch.int32)).clamp(max=limit),
            block_tables=tables,
            num_decodes=0,
            decode_count=None,
            max_query_len=batch.max_query_len + 1,
            max_seq_len=min(batch.max_seq_len + 1, limit),
            logits_idx=newest_at.to(torch.int32),
            adapter_ids=None,
            shared={},
        )
        own_tables = tables.index_select(0, owners.clamp(max=num_rows - 1))
        return first, DraftStep(newest_positions, newest_positions + 1, own_tables, is_real, first.max_seq_len)

    def sequence_tables(self, batch: ForwardBatch, rows: Tensor, last: Tensor) -> Tensor:
        """int32 [S, B + spare]: the block tables of sequences, in which their spare blocks follow the blocks that the step needs.

        `rows` int32 [S] are their indices in the device buffers, `last` int32 [S] those of their last valid tokens.
        """
        owners = (torch.searchsorted(batch.query_starts, last.contiguous(), right=True) - 1).clamp(max=batch.num_rows - 1)  # padding: R
        used = -(-batch.seq_lens.index_select(0, owners) // self.block_size)[:, None]
        return self._joined(batch.block_tables.index_select(0, owners), used, self.blocks.index_select(0, rows.long()))

    def _tables(self, batch: ForwardBatch, rows: Tensor) -> Tensor:
        """int32 [R, B + spare]: the block tables of the step, in which the spare blocks of `rows` [R] follow the blocks that it needs."""
        used = -(-batch.seq_lens // self.block_size)[:, None]
        return self._joined(batch.block_tables, used, self.blocks.index_select(0, rows))

    def _joined(self, tables: Tensor, used: Tensor, spare: Tensor) -> Tensor:
        """int32 [N, B + spare]: the first `used` [N, 1] blocks of `tables` [N, B], and then those of `spare` [N, spare]."""
        index = torch.arange(tables.shape[1] + spare.shape[1], dtype=torch.int32, device=tables.device)[None]
        beyond = spare.gather(1, (index - used).clamp(0, spare.shape[1] - 1).long())
        return torch.where(index < used, torch.cat((tables, spare), dim=1), beyond)


def without_logits(batch: ForwardBatch) -> ForwardBatch:
    """The batch with which a draft engine computes tokens, and drafts nothing."""
    return replace(batch, logits_idx=batch.query_starts[1:1], adapter_ids=None, shared={})


def _slots(tables: Tensor, positions: Tensor, is_stored: Tensor, block_size: int) -> Tensor:
    """int32 [T]: the slot of each token, whose block table is a row of `tables` [T, B]; -1 where nothing is stored."""
    blocks = tables.gather(1, (positions // block_size).long()[:, None])[:, 0]
    return torch.where(is_stored, blocks * block_size + positions % block_size, -1)
