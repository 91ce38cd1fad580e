"""A plan becomes a ForwardBatch: one int32 buffer filled on the host, one copy to the device, views into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.layers.batch import ForwardBatch
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import StepPlan


@dataclass(slots=True)
class StepInputs:
    """A step's batch and what sampling needs to know of its rows."""

    batch: ForwardBatch
    sampled: list[Sequence]  # rows that get a token, in the order of the logits
    rows: Tensor  # int32 [len(sampled)]: their indices in the device buffers
    counters: Tensor  # int32 [len(sampled)]: positions of the tokens to draw
    pending: bool  # some token ids are still on the device only


class BlockTables:
    """The block tables of all rows on the host; kept in step with sequences as they grow."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._lengths = [0] * num_rows
        self._owners: list[int] = [-1] * num_rows

    def update(self, seq: Sequence) -> None:
        """Copy the blocks that `seq` gained since the last step."""
        row, blocks = seq.row, seq.blocks
        known = self._lengths[row]
        if self._owners[row] != seq.seq_id or known > len(blocks):
            known = 0
            self._owners[row] = seq.seq_id
        if known < len(blocks):
            self.table[row, known : len(blocks)] = blocks[known:]
            self._lengths[row] = len(blocks)

    def forget(self, row: int) -> None:
        """The row's sequence lost its blocks."""
        self._owners[row] = -1


class InputBuilder:
    """Builds the inputs of one step after another."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.tables = BlockTables(num_rows, max_blocks)
        self.block_size = block_size
        self.device = device
        self.max_blocks = max_blocks
        self.pinned = device.type == "cuda"

    def build(self, plan: StepPlan) -> StepInputs:
        sequences, num_new = plan.sequences, plan.num_new
        num_rows, num_tokens, num_decodes = len(sequences), plan.num_tokens, plan.num_decodes
        for seq in sequences:
            self.tables.update(seq)
        rows = np.fromiter((seq.row for seq in sequences), np.int32, num_rows)
        starts = np.fromiter(plan.starts, np.int32, num_rows)
        counts = np.fromiter(num_new, np.int32, num_rows)
        seq_lens = starts + counts
        longest = int(seq_lens.max())
        width = -(-longest // self.block_size)
        sampled = [i for i in range(num_rows) if plan.samples[i]]
        extra = _prompt_logit_tokens(plan)
        num_logits = len(sampled) + len(extra)

        sizes = (num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows, num_rows * width, num_logits, len(sampled), len(sampled))
        packed = np.empty(sum(sizes), dtype=np.int32)
        token_ids, positions, slots, query_starts, lens, tables, logits_idx, sampled_rows, counters = _cut(packed, sizes)

        query_starts[0] = 0
        np.cumsum(counts, out=query_starts[1:])
        lens[:] = seq_lens
        tables = tables.reshape(num_rows, width)
        np.take(self.tables.table[:, :width], rows, axis=0, out=tables)
        pending = _fill_tokens(plan, token_ids)
        positions[:num_decodes] = starts[:num_decodes]
        if num_decodes < num_rows:
            np.subtract(np.arange(num_tokens, dtype=np.int32), np.repeat(query_starts[:-1] - starts, counts), out=positions)
        owner = np.repeat(np.arange(num_rows), counts) if num_decodes < num_rows else np.arange(num_rows)
        slots[:] = tables[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        picked = np.asarray(sampled, dtype=np.int32)
        logits_idx[: len(sampled)] = query_starts[1:][picked] - 1
        logits_idx[len(sampled) :] = extra
        sampled_rows[:] = rows[picked]
        counters[:] = seq_lens[picked]

        views = _cut(self._send(packed), sizes)
        batch = ForwardBatch(
            token_ids=views[0],
            positions=views[1],
            slots=views[2],
            query_starts=views[3],
            seq_lens=views[4],
            block_tables=views[5].view(num_rows, width),
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=longest,
            logits_idx=views[6],
        )
        return StepInputs(batch, [sequences[i] for i in sampled], views[7], views[8], pending)

    def _send(self, packed: np.ndarray) -> Tensor:
        host = torch.from_numpy(packed)
        if not self.pinned:
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _fill_tokens(plan: StepPlan, token_ids: np.ndarray) -> bool:
    """Write the step's token ids; one that only the device knows becomes -1 - row. Returns whether there is such a one."""
    pending = False
    at = 0
    for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
        tokens = seq.tokens
        if count == 1:
            if start < len(tokens):
                token_ids[at] = tokens[start]
            else:
                token_ids[at] = -1 - seq.row
                pending = True
        else:
            known = tokens[start : start + count]
            token_ids[at : at + len(known)] = known
            if len(known) < count:
                token_ids[at + len(known)] = -1 - seq.row
                pending = True
        at += count
    return pending


def _prompt_logit_tokens(plan: StepPlan) -> list[int]:
    """Flat indices of prompt tokens whose logits are wanted beside the sampled ones."""
    wanted: list[int] = []
    at = 0
    for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
        if seq.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
            wanted += range(at, at + min(count, seq.num_prompt - 1 - start))
        at += count
    return wanted


def _cut(buffer: np.ndarray | Tensor, sizes: tuple[int, ...]) -> list:
    views, at = [], 0
    for size in sizes:
        views.append(buffer[at : at + size])
        at += size
    return views
