"""Builds the ForwardBatch of a step plan: one int32 buffer is filled on the host, copied to the device, and split into views."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stoker.core.forward_batch import NO_TREE, ForwardBatch, RankCounts, TreeMask, VerifiedRows
from stoker.runtime.request import NO_ADAPTER, Sequence
from stoker.runtime.sampling.prompt_logprobs import prompt_chunks
from stoker.runtime.sampling.verification import node_masks, node_offsets
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.staging import StagingBuffers
from stoker.runtime.worker.prefix_lm import fill_prefix_lm_positions
from stoker.runtime.worker.split_length import split_length

Buffer = TypeVar("Buffer", np.ndarray, Tensor)
_NOTHING = torch.empty(0, dtype=torch.int32)
BLOCK_TABLES = 18  # the part of the buffer whose size depends on the lengths of the rows; the parts before it have fixed places
_ALIGN = 4  # int32: each part of the buffer starts at a multiple of 16 bytes, so that Triton does not compile kernels for other alignments
_CHAIN_MASKS = np.array([(2 << node) - 1 for node in range(64)], dtype=np.uint64).view(np.int64)  # of the nodes of a chain (`node_masks`)


@dataclass(frozen=True, slots=True)
class Shape:
    """The padded size of a step. Padding follows the real tokens and rows, and has no effect."""

    tokens: int
    rows: int
    is_decode: bool  # every row has exactly one token
    max_drafts: int = 0  # above 0: the step consists of decodes with at most this number of drafts, and samples after every token


@dataclass(slots=True)
class PackedStep:
    """The inputs of a step in one int32 buffer on the host, and the sizes of its parts: everything that a follower needs to run it."""

    host: Tensor
    shape: Shape
    width: int  # entries of a block table
    num_logits: int
    num_sampled: int  # including padding
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    is_padded: bool  # to the shape of a captured graph
    sampled: list[Sequence]  # of the rows that sample, in the order of the logits; empty on followers
    num_extra: int = 0  # logits of prompt tokens, which follow those of the sampled rows
    is_prefix_lm: bool = False  # rows have a prefix length, and tokens a second position
    has_adapters: bool = False  # tokens have an adapter index
    max_drafts: int = 0  # the largest number of drafts of a row; 0: no row verifies drafts
    verified: VerifiedRows | None = None  # with drafts: the rows that have any
    num_sequences: int = 0  # with drafts: the sequences that sample; each has as many logits as drafts, and one more
    num_restores: int = 0  # recurrent states to copy before the step, and after it
    num_saves: int = 0
    num_moves: int = 0  # keys and values to copy before the step
    draft_ids: list[Seq[int]] = field(default_factory=list)  # with drafts: those of each sampled sequence; empty on followers
    ranks: RankCounts | None = None  # with data-parallel ranks: the sizes of the parts of all, of which this is one
    draft_parents: list[Seq[int]] = field(default_factory=list)  # with drafts: the parents of those of each sampled sequence

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the buffer's parts, in int32 elements, in their order."""
        tokens, rows = self.shape.tokens, self.shape.rows
        sizes: tuple[int, ...] = (tokens, tokens, tokens, rows + 1, rows)
        sizes = (*sizes, self.num_logits, self.num_sampled, self.num_sampled, *self._draft_sizes, rows, 1, 1, 1, rows * self.width)
        if self.is_prefix_lm:
            sizes = (*sizes, tokens, rows)
        if self.has_adapters:
            sizes = (*sizes, tokens)
        if self.num_restores or self.num_saves:
            sizes = (*sizes, 2 * self.num_restores, 2 * self.num_saves)
        return (*sizes, 2 * self.num_moves) if self.num_moves else sizes

    @property
    def _draft_sizes(self) -> tuple[int, ...]:
        """The sizes of `StepInputs.starts`, `owners`, `sequence_rows`, `parents`, `masks`, and of `TreeMask.starts`."""
        if not self.max_drafts:
            return (0,) * 6
        return self.num_sequences + 1, self.num_sampled, self.num_sequences, self.num_sampled, 2 * self.shape.tokens, self.shape.rows

    @property
    def moves(self) -> Tensor | None:
        """The slots (from, to) of keys and values to copy before the step: int32 [num_moves, 2] on the host, or None."""
        return split_buffer(self.host, self.sizes)[-1].view(-1, 2) if self.num_moves else None

    @property
    def buffer_size(self) -> int:
        """The size of the buffer in int32 elements, including the gaps between its parts."""
        return buffer_size(self.sizes)


class StateCopies(NamedTuple):
    """Recurrent states to copy around a step."""

    restores: Tensor | None = None  # int32 [N, 2], slots (from, to) before the step; None: no copies
    saves: Tensor | None = None  # the same after the step; slots below 0 are counted from the end


@dataclass(slots=True)
class StepInputs:
    """The tensors of a step on the device."""

    batch: ForwardBatch
    rows: Tensor  # int32 [num_sampled], indices of the sampled rows in the device buffers; padding has the index after the last row
    counters: Tensor  # int32 [num_sampled], positions of the tokens to sample
    starts: Tensor | None = None  # int32 [num_sequences + 1], with drafts: the first logits of each sequence, and num_sampled
    owners: Tensor | None = None  # int32 [num_sampled], with drafts: the sequence of the logits
    sequence_rows: Tensor | None = None  # int32 [num_sequences], with drafts: like rows, for each sequence
    parents: Tensor | None = None  # int32 [num_sampled], with drafts: see `StepDrafts.parents`
    masks: Tensor | None = None  # int64 [T], with drafts: see `StepDrafts.masks`
    states: StateCopies = field(default_factory=StateCopies)

    @property
    def newest_rows(self) -> Tensor:
        """The index of each sequence that samples in the device buffers."""
        return self.rows if self.sequence_rows is None else self.sequence_rows


class HostBlockTables:
    """The block tables of all rows on the host."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.table = np.zeros((num_rows + 1, max_blocks), dtype=np.int32)
        self._owners = [(-1, 0)] * num_rows

    def update(self, seq: Sequence) -> None:
        """Copy the blocks that were assigned to `seq` since the last call. After a preemption it has different blocks."""
        row, blocks = seq.row, seq.blocks
        owner = (seq.seq_id, seq.num_preemptions)
        known = seq.num_tabled_blocks
        if self._owners[row] != owner:
            known = 0
            self._owners[row] = owner
        if known < len(blocks):
            self.table[row, known : len(blocks)] = blocks[known:]
            seq.num_tabled_blocks = len(blocks)


class LogitRows(NamedTuple):
    """The L rows of logits of the S sequences that sample in a step with drafts: one after the newest token, and one after each draft."""

    owners: np.ndarray  # int64 [L], the sequence of each row
    rows: np.ndarray  # int32 [L], the row of the plan
    nodes: np.ndarray  # int32 [L], the number of the row among those of its sequence
    num_after: np.ndarray  # int32 [L], the tokens of the sequence from that of the row on
    ends: np.ndarray  # int32 [S], the number of rows of logits up to those of each sequence

    @staticmethod
    def of(sampled: np.ndarray, drafts: list[Seq[int]]) -> LogitRows:
        """`sampled` int32 [S] are the rows of a plan that sample, `drafts` those of each."""
        counts = np.array([1 + len(ids) for ids in drafts], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        owners = np.arange(len(sampled)).repeat(counts)
        num_after = ends[owners] - np.arange(len(owners), dtype=np.int32)
        return LogitRows(owners, sampled[owners], counts[owners] - num_after, num_after, ends)


class InputBuilder:
    """Builds the inputs of steps, one after another."""

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device, num_in_flight: int = 2, *, has_trees: bool = False,
        resident_rows: float = 0.0,
    ) -> None:  # fmt: skip
        """`has_trees`: drafts may be trees, so that steps with drafts have a TreeMask. `resident_rows`: see `split_length`."""
        self.has_trees, self.resident_rows = has_trees, resident_rows
        self.tables = HostBlockTables(num_rows, max_blocks)
        self.num_rows = num_rows
        self.block_size = block_size
        self.device = device
        self._buffers = StagingBuffers(device, num_in_flight)

    def pack(self, plan: StepPlan, shape: Shape | None = None) -> PackedStep:
        """The inputs of `plan`, padded to `shape` if a captured graph runs it."""
        sequences = plan.sequences
        num_rows, num_tokens = len(sequences), plan.num_tokens
        is_padded = shape is not None
        shape = shape or Shape(num_tokens, num_rows, plan.num_decodes == num_rows)
        update = self.tables.update
        for seq in sequences:
            update(seq)
        rows = np.fromiter([seq.row for seq in sequences], np.int32, num_rows)
        starts = np.array(plan.starts, dtype=np.int32)
        counts = np.array(plan.num_new, dtype=np.int32)
        seq_lens = starts + counts
        longest = int(seq_lens.max())
        sampled = list(range(num_rows)) if all(plan.samples) else [i for i in range(num_rows) if plan.samples[i]]
        max_drafts = max(map(len, plan.drafts))
        if is_padded:
            max_drafts = shape.max_drafts
        num_sampled = len(sampled) + sum(map(len, plan.drafts)) if max_drafts else len(sampled)
        if is_padded:  # a captured graph samples after every row or token, so that the number of logits depends only on the shape
            num_sampled = shape.tokens if max_drafts else shape.rows
        extra = [at for chunk in prompt_chunks(plan) for at in range(chunk.at, chunk.at + len(chunk.targets))]
        packed = PackedStep(
            host=_NOTHING,
            shape=shape,
            width=-(-longest // self.block_size),
            num_logits=num_sampled if is_padded else num_sampled + len(extra),
            num_sampled=num_sampled,
            num_decodes=shape.rows if shape.is_decode else 0 if is_padded else plan.num_decodes,
            max_query_len=1 if num_tokens == num_rows else int(counts.max()),
            max_seq_len=longest,
            is_padded=is_padded,
            sampled=[sequences[i] for i in sampled],
            num_extra=len(extra),
            is_prefix_lm=sequences[0].bidirectional_prefix is not None,
            has_adapters=plan.adapters is not None,
            max_drafts=max_drafts,
            verified=_verified_rows(plan, shape if is_padded else None, max_drafts),
            num_restores=len(plan.state_restores),
            num_saves=len(plan.state_saves),
            num_moves=len(plan.moves),
            num_sequences=(shape.rows if is_padded else len(sampled)) if max_drafts else 0,
            draft_ids=[plan.drafts[i] for i in sampled] if max_drafts else [],
            draft_parents=[plan.parents[i] for i in sampled] if max_drafts else [],
        )
        sizes = packed.sizes
        packed.host = self.buffer(buffer_size(sizes))
        parts = split_buffer(packed.host.numpy(), sizes)
        ids, positions, slots, query_starts, lens, logits_idx, sampled_rows, counters, *drafted, state_slots = parts[:15]
        decode_count, row_count, split_tokens, flat_tables, *optional = parts[15:]

        query_starts[0] = 0
        np.cumsum(counts, out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = num_tokens
        lens[:num_rows] = seq_lens
        lens[num_rows:] = 0
        decode_count[0], row_count[0] = plan.num_decodes, num_rows
        split_tokens[0] = split_length(seq_lens[: plan.num_decodes], self.resident_rows)
        state_slots[:num_rows] = rows
        state_slots[num_rows:] = self.num_rows
        block_tables = flat_tables.reshape(shape.rows, packed.width)
        np.take(self.tables.table[:, : packed.width], rows, axis=0, out=block_tables[:num_rows])
        block_tables[num_rows:] = 0
        _fill_tokens(plan, ids, self.num_rows)
        if packed.num_moves:
            optional.pop()[:] = [slot for move in plan.moves for slot in move]
        if packed.num_restores or packed.num_saves:
            saves, restores = optional.pop(), optional.pop()
            restores[:] = [slot for seq, saved in plan.state_restores for slot in (saved, seq.row)]
            saves[:] = [slot for save in _state_copies(plan, query_starts) for slot in save]
        self._fill_positions(plan, starts, counts, query_starts, block_tables, positions, slots)
        if plan.adapters is not None:
            adapter_ids = optional.pop()
            adapter_ids[:num_tokens] = np.repeat(np.array(plan.adapters, dtype=np.int32), counts)
            adapter_ids[num_tokens:] = NO_ADAPTER
        if optional:
            prefixes = [seq.bidirectional_prefix for seq in sequences if seq.bidirectional_prefix is not None]
            fill_prefix_lm_positions(prefixes, counts, positions, *optional)
        for padded in (ids, positions):
            padded[num_tokens:] = 0
        slots[num_tokens:] = -1
        picked = np.array(sampled, dtype=np.int32)
        logits = LogitRows.of(picked, packed.draft_ids) if max_drafts else None
        picked, num_after = (picked, 1) if logits is None else (logits.rows, logits.num_after)
        self._fill_sampled(picked, num_after, extra, rows, query_starts, seq_lens, logits_idx, sampled_rows, counters)
        if logits is not None:
            self._fill_drafts(logits, rows[sampled], *drafted[:3])
            _fill_nodes(plan, logits, starts, logits_idx, *drafted[3:])
            _move_branches(plan, packed, query_starts, positions, counters, *drafted[3:5])
        return packed

    def send(self, packed: PackedStep, static: Tensor, tables: Tensor) -> StateCopies:
        """Start to copy a packed step to the buffers that a captured graph reads. Returns the copies of states around it.

        `static` int32 holds everything except the block tables, at offsets that depend only on the shape; `tables` is [rows, max_blocks].
        """
        host, sizes = packed.host, packed.sizes
        if packed.num_moves:  # the static buffer has no room for them, and they are not read by the graph
            sizes = sizes[:-1]
            host = host[: buffer_size(sizes)]
        buffer = static[: host.numel()]
        buffer.copy_(host, non_blocking=True)
        parts = _layout(sizes)[1]
        tables[:, : packed.width].copy_(buffer[parts[BLOCK_TABLES]].view(-1, packed.width))
        if not packed.num_restores and not packed.num_saves:
            return StateCopies()
        return StateCopies(*(buffer[part].view(-1, 2) for part in parts[-2:]))

    def unpack(self, packed: PackedStep) -> StepInputs:
        """Start to copy a packed step to the device. Returns its tensors."""
        return self.step_inputs(packed, split_buffer(packed.host.to(self.device, non_blocking=True), packed.sizes))

    def step_inputs(self, packed: PackedStep, views: list[Tensor]) -> StepInputs:
        """The tensors of a packed step, of which `views` are the parts of its buffer on the device, in the order of `sizes`."""
        batch = ForwardBatch(
            token_ids=views[0],
            positions=views[1],
            slots=views[2],
            query_starts=views[3],
            seq_lens=views[4],
            block_tables=views[BLOCK_TABLES].view(packed.shape.rows, -1),
            state_slots=views[14],
            verified=packed.verified,
            num_decodes=packed.num_decodes,
            max_query_len=packed.max_query_len,
            max_seq_len=packed.max_seq_len,
            logits_idx=views[5],
            block_positions=views[BLOCK_TABLES + 1] if packed.is_prefix_lm else None,
            prefix_lens=views[BLOCK_TABLES + 2] if packed.is_prefix_lm else None,
            adapter_ids=views[BLOCK_TABLES + (3 if packed.is_prefix_lm else 1)] if packed.has_adapters else None,
            split_tokens=views[17],
            ranks=packed.ranks,
        )
        inputs = StepInputs(batch, views[6], views[7])
        if packed.max_drafts:
            set_draft_inputs(inputs, views[8:14], has_trees=self.has_trees)
        if packed.num_restores or packed.num_saves:
            last = len(views) - (packed.num_moves > 0)
            inputs.states = StateCopies(views[last - 2].view(-1, 2), views[last - 1].view(-1, 2))
        return inputs

    def buffer(self, size: int) -> Tensor:
        """A host buffer, int32 [size], that is valid for one step."""
        return self._buffers.next_buffer(size * _NOTHING.itemsize).view(torch.int32)

    def _fill_positions(
        self, plan: StepPlan, starts: np.ndarray, counts: np.ndarray, query_starts: np.ndarray, tables: np.ndarray,
        positions: np.ndarray, slots: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the position of each token to `positions`, and the slot of its key and value to `slots`."""
        num_rows, num_tokens, size = len(starts), plan.num_tokens, self.block_size
        owner = np.arange(num_rows) if num_rows == num_tokens else np.repeat(np.arange(num_rows), counts)
        if num_rows == num_tokens:
            positions[:num_tokens] = starts
        else:
            positions[:num_tokens] = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_starts[:num_rows] - starts, counts)
        filled = positions[:num_tokens]
        slots[:num_tokens] = tables[owner, filled // size] * size + filled % size

    def _fill_sampled(
        self, picked: np.ndarray, num_after: np.ndarray | int, extra: list[int], rows: np.ndarray, query_starts: np.ndarray,
        seq_lens: np.ndarray, logits_idx: np.ndarray, sampled_rows: np.ndarray, counters: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the indices of the tokens whose logits are computed, the rows that sample, and their counters.

        Logits i are of the row `picked[i]` of the plan, after all but the last `num_after[i] - 1` of its tokens. `extra` are further tokens
        that need logits.
        """
        count = len(picked)
        logits_idx[:count] = query_starts[1:][picked] - num_after
        if extra:
            logits_idx[count : count + len(extra)] = extra
        logits_idx[count + len(extra) :] = 0
        sampled_rows[:count] = rows[picked]
        sampled_rows[count:] = self.num_rows
        counters[:count] = seq_lens[picked] + 1 - num_after
        counters[count:] = 0

    def _fill_drafts(self, logits: LogitRows, rows: np.ndarray, starts: np.ndarray, owners: np.ndarray, padded: np.ndarray) -> None:
        """Write the first logits of each sequence that samples to `starts`, their owners, and `rows` to `padded`."""
        num_sequences, count = len(logits.ends), len(logits.owners)
        starts[0] = 0
        starts[1 : num_sequences + 1] = logits.ends
        starts[num_sequences + 1 :] = count
        owners[:count] = logits.owners
        owners[count:] = 0
        padded[:num_sequences] = rows
        padded[num_sequences:] = self.num_rows


def _fill_nodes(
    plan: StepPlan, logits: LogitRows, starts: np.ndarray, logits_idx: np.ndarray, parents: np.ndarray, masks: np.ndarray,
    tree_starts: np.ndarray,
) -> None:  # fmt: skip
    """Write the parents and masks of the nodes as if all drafts were chains, and the positions at which the trees begin."""
    count, num_rows, bits = len(logits.nodes), len(starts), masks.view(np.int64)
    np.maximum(logits.nodes - 1, 0, out=parents[:count])
    parents[count:] = 0
    bits[:] = 1
    bits[logits_idx[:count]] = _CHAIN_MASKS[logits.nodes]
    has_drafts = np.fromiter(map(len, plan.drafts), np.int32, num_rows) > 0
    tree_starts[:num_rows] = np.where(has_drafts, starts, NO_TREE)
    tree_starts[num_rows:] = NO_TREE


def _move_branches(
    plan: StepPlan, packed: PackedStep, query_starts: np.ndarray, positions: np.ndarray, counters: np.ndarray, parents: np.ndarray,
    masks: np.ndarray,
) -> None:  # fmt: skip
    """Correct the parents, masks, positions and counters of trees that are not chains. Nodes of one depth have one position."""
    for row, row_parents in enumerate(plan.parents):
        if row_parents and type(row_parents) is not range:
            nodes = slice(query_starts[row], query_starts[row] + 1 + len(row_parents))
            masks.view(np.int64)[nodes] = node_masks(row_parents)
            positions[nodes] += node_offsets(row_parents)
    at = 0
    for row_parents in packed.draft_parents:
        count = len(row_parents)
        if count and type(row_parents) is not range:
            parents[at + 1 : at + 1 + count] = row_parents
            counters[at : at + 1 + count] += node_offsets(row_parents)
        at += 1 + count


def set_draft_inputs(inputs: StepInputs, parts: Seq[Tensor], *, has_trees: bool) -> None:
    """Set the tensors of drafts from the six parts of the buffer (`PackedStep._draft_sizes`)."""
    inputs.starts, inputs.owners, inputs.sequence_rows, inputs.parents = parts[:4]
    inputs.masks = parts[4].view(torch.int64)
    if has_trees:
        inputs.batch.tree = TreeMask(inputs.masks, parts[5])


def _verified_rows(plan: StepPlan, shape: Shape | None, max_drafts: int) -> VerifiedRows | None:
    """The rows of a plan that verify drafts; of a padded step, all rows of its `shape`."""
    if not max_drafts:
        return None
    if shape is not None:
        return VerifiedRows(shape.rows, shape.tokens, 1 + max_drafts)
    counts = [1 + len(drafts) for drafts in plan.drafts if drafts]
    return VerifiedRows(len(counts), sum(counts), max(counts))


def _state_copies(plan: StepPlan, query_starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """(from, to) of the slots to copy for `plan.state_saves`. The states of rows that verify drafts are in the slots of their tokens."""
    verified = {plan.sequences[row].seq_id: row for row, drafts in enumerate(plan.drafts) if drafts}
    for seq, end, saved in plan.state_saves:
        row = verified.get(seq.seq_id)
        yield (seq.row if row is None else -1 - (int(query_starts[row]) + end - 1 - plan.starts[row])), saved


def _fill_tokens(plan: StepPlan, token_ids: np.ndarray, num_rows: int) -> None:
    """Write the token ids of the step.

    An id that only the device has is written as -1 - its index in `ModelRunner.last_ids`: a row's newest id, or its draft number i
    (from 0), which is at (i + 1) × (num_rows + 1) + row.
    """
    ids: list[int] = []
    for seq, start, count, drafts in zip(plan.sequences, plan.starts, plan.num_new, plan.drafts, strict=True):
        tokens = seq.tokens
        if count == 1:
            ids.append(tokens[start] if start < len(tokens) else -1 - seq.row)
            continue
        known = tokens[start : start + count - len(drafts)]
        ids += known
        if len(known) < count - len(drafts):
            ids.append(-1 - seq.row)
        if drafts:
            ids += [token if token >= 0 else -1 - (i * (num_rows + 1) + seq.row) for i, token in enumerate(drafts, 1)]
    token_ids[: len(ids)] = ids


@lru_cache(maxsize=4096)
def _layout(sizes: tuple[int, ...]) -> tuple[int, tuple[slice, ...]]:
    """The number of int32 elements of a buffer with parts of these sizes, each of which starts at a multiple of 16 bytes, and the parts."""
    parts, at = [], 0
    for size in sizes:
        parts.append(slice(at, at + size))
        at += -(-size // _ALIGN) * _ALIGN
    return at, tuple(parts)


def buffer_size(sizes: tuple[int, ...]) -> int:
    """The number of int32 elements of a buffer with parts of these sizes, each of which starts at a multiple of 16 bytes."""
    return _layout(sizes)[0]


def split_buffer(buffer: Buffer, sizes: tuple[int, ...]) -> list[Buffer]:
    """Views of the parts of a buffer with these sizes (see `buffer_size`)."""
    return [buffer[part] for part in _layout(sizes)[1]]
