"""A stub of the device for the scheduler: it stores one value per cache slot, copies blocks between tiers, and checks every read."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from stoker.base.types import FinishReason
from stoker.runtime.kv.tiers import BlockTransfer, HostTier, Tier, TierOccupancy
from stoker.runtime.request import PrefixRoot, Sequence, Status
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.proposers.proposer import Proposer

VOCAB = 7
MAX_DRAFTS = 7

EXPECTED: dict[int, list[int]] = {}  # seq_id → the tokens that the sequence must generate


def link(before: int, token: int) -> int:
    """Represents the keys and values of a token: a function of the token and of everything before it."""
    return zlib.crc32(f"{before},{token}".encode())


def root(prefix_root: PrefixRoot) -> int:
    """Sequences with different salts or adapters have different keys and values."""
    return zlib.crc32(repr(prefix_root).encode())


def sample(state: int, index: int) -> int:
    return zlib.crc32(f"{state}/{index}".encode()) % VOCAB


def chain(prefix_root: PrefixRoot, tokens: list[int]) -> list[int]:
    states, state = [], root(prefix_root)
    for token in tokens:
        state = link(state, token)
        states.append(state)
    return states


def reference(seq: Sequence) -> tuple[list[int], FinishReason]:
    """The tokens that the sequence must generate, computed without a scheduler."""
    state, out = chain(seq.prefix_root, seq.request.prompt_ids)[-1], []
    while True:
        token = sample(state, seq.index)
        out.append(token)
        state = link(state, token)
        if token in seq.end_ids and len(out) > seq.params.min_tokens:
            return out, FinishReason.STOP
        if len(out) == seq.max_tokens:
            return out, FinishReason.LENGTH


def drafts_after(seq: Sequence, start: int, count: int) -> list[int]:
    """Drafts for the positions from `start` on, of which about one in four is wrong."""
    true = [*seq.request.prompt_ids, *EXPECTED[seq.seq_id]]
    rng = random.Random(f"{seq.seq_id}/{start}")
    return [true[p] if p < len(true) and rng.random() < 0.75 else rng.randrange(VOCAB) for p in range(start, start + count)]


def draft_count(seq: Sequence, limit: int) -> int:
    return random.Random(f"{seq.seq_id},{seq.num_computed}").randrange(limit + 1)


class HostDrafts(Proposer):
    """Proposes drafts from the ids that the host knows."""

    max_drafts = MAX_DRAFTS
    reads_token_ids = True

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        assert seq.num_computed == len(seq.tokens) and 1 <= limit <= MAX_DRAFTS
        return drafts_after(seq, len(seq.tokens), draft_count(seq, limit))


class DeviceDrafts(Proposer):
    """Leaves the drafts to the device, so that steps are planned before the ids of earlier steps are known."""

    max_drafts = MAX_DRAFTS
    reads_token_ids = False

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        assert 1 <= limit <= MAX_DRAFTS
        return [-1] * draft_count(seq, limit)


class StubHostTier(HostTier):
    """At most `num_blocks` blocks. Evicts the least recently used contents. `p_decline`: probability of declining contents."""

    def __init__(self, num_blocks: int, p_decline: float) -> None:
        self.digests: list[bytes | None] = [None] * num_blocks
        self.order = list(range(num_blocks))  # least recently used first
        self.loads = Counter[int]()
        self.stores: dict[int, bytes] = {}
        self.p_decline = p_decline
        self.dice = random.Random(num_blocks)

    @property
    def is_idle(self) -> bool:
        return not self.stores and not +self.loads

    def occupancy(self, num_cells: int) -> TierOccupancy:
        size = max(1, -(-len(self.digests) // num_cells))
        starts = range(0, len(self.digests), size)
        busy = [block in self.stores or self.loads[block] > 0 for block in range(len(self.digests))]
        cached = [digest is not None and not busy[block] for block, digest in enumerate(self.digests)]
        used, held = ([sum(flags[start : start + size]) for start in starts] for flags in (busy, cached))
        return TierOccupancy("host", len(self.digests), size, used, [0] * len(used), held)

    def find(self, digest: bytes) -> int:
        return self.digests.index(digest) if digest in self.digests else -1

    def begin_load(self, block: int) -> None:
        assert self.digests[block] is not None and block not in self.stores
        self.loads[block] += 1
        self._touch(block)

    def end_load(self, block: int) -> None:
        assert self.loads[block] > 0
        self.loads[block] -= 1

    def begin_store(self, digest: bytes) -> int:
        if digest in self.digests or digest in self.stores.values() or self.dice.random() < self.p_decline:
            return -1
        block = next((block for block in self.order if not self.loads[block] and block not in self.stores), -1)
        if block >= 0:
            self.digests[block] = None
            self.stores[block] = digest
            self._touch(block)
        return block

    def end_store(self, block: int, *, succeeded: bool) -> None:
        digest = self.stores.pop(block)
        self.digests[block] = digest if succeeded else None

    def _touch(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)


@dataclass
class PlannedRow:
    """A row as the device received it: its block table, known ids and drafts are copied when the step is planned."""

    seq: Sequence
    row: int
    start: int
    num_new: int
    samples: bool
    known: list[int]
    drafts: list[int]
    blocks: list[int]
    num_rejected: int  # tokens of the sequence that commits before this plan rejected
    states: list[int] = field(default_factory=list)  # after each of its tokens, once it ran


@dataclass
class Flight:
    """A plan in flight."""

    plan: StepPlan
    rows: list[PlannedRow]
    ids: list[list[int]] | None = None
    restores: list[tuple[int, int]] = field(default_factory=list)  # slots (from, to) of recurrent states
    saves: list[tuple[Sequence, int, int]] = field(default_factory=list)


@dataclass
class Device:
    """`p_nothing`: the probability that a row yields no token. `slots` and `host_slots` have a value per token position of each tier.

    With `has_states`, rows also continue from a recurrent state per slot, which must be that of their tokens.
    """

    size: int
    p_nothing: float
    has_states: bool = False
    states: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    host_slots: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # row → newest id, as on a real device
    num_rejected: Counter[int] = field(default_factory=Counter)  # seq_id → tokens rejected by steps that ran
    num_applied: Counter[int] = field(default_factory=Counter)  # seq_id → tokens rejected by steps that were committed
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def copy(self, plan: StepPlan) -> Flight:
        rows = []
        for seq, start, num_new, samples, drafts in zip(plan.sequences, plan.starts, plan.num_new, plan.samples, plan.drafts, strict=True):
            known = seq.tokens[start : start + num_new - len(drafts)]
            assert len(known) == num_new - len(drafts) or (num_new == 1 + len(drafts) and not known and start >= seq.num_prompt)
            rows.append(
                PlannedRow(seq, seq.row, start, num_new, samples, known, list(drafts), list(seq.blocks), self.num_applied[seq.seq_id])
            )
        restores = [(slot, seq.row) for seq, slot in plan.state_restores]
        return Flight(plan, rows, None, restores, list(plan.state_saves))

    def run(self, flight: Flight) -> None:
        for transfer in flight.plan.transfers:
            self.copy_block(transfer)
        for source, target in flight.restores:
            self.states[target] = self.states[source]
        flight.ids = [self.run_row(planned) for planned in flight.rows]
        for seq, end, target in flight.saves:
            planned = next(planned for planned in flight.rows if planned.seq is seq)
            self.states[target] = planned.states[end - planned.start - 1]

    def copy_block(self, transfer: BlockTransfer) -> None:
        tiers = {Tier.DEVICE: self.slots, Tier.HOST: self.host_slots}
        for offset in range(self.size):
            value = tiers[transfer.source][transfer.source_block * self.size + offset]
            tiers[transfer.target][transfer.target_block * self.size + offset] = value

    def fail(self, flight: Flight) -> None:
        """The step raised: the targets of its transfers, and the states of its rows, have undefined contents."""
        for target in [target for *_, target in (*flight.restores, *flight.saves)] + [planned.row for planned in flight.rows]:
            self.states[target] = -1
        for transfer in flight.plan.transfers:
            slots = self.slots if transfer.target is Tier.DEVICE else self.host_slots
            slots.update({transfer.target_block * self.size + offset: -1 for offset in range(self.size)})

    def run_row(self, planned: PlannedRow) -> list[int]:
        """Verify the drafts of a row, or compute its prompt tokens. Returns the ids that the row yields."""
        seq, prefix_root = planned.seq, planned.seq.prefix_root
        start = planned.start - (self.num_rejected[seq.seq_id] - planned.num_rejected)
        drafts = drafts_after(seq, start + 1, len(planned.drafts)) if -1 in planned.drafts else planned.drafts
        known = planned.known or [self.newest.get(planned.row, -1)]  # -1: the step that sampled it has failed
        assert len(planned.blocks) * self.size >= start + planned.num_new
        slots = [planned.blocks[p // self.size] * self.size + p % self.size for p in range(start + planned.num_new)]
        read = [self.slots[slot] for slot in slots[:start]]
        states, state = [], read[-1] if read else root(prefix_root)
        if self.has_states and start and seq.status is not Status.FINISHED:  # a failed step ends its sequences
            assert self.states[planned.row] == state, "a row continues from another state than that of its tokens"
        for slot, token in zip(slots[start:], [*known, *drafts], strict=True):
            state = self.slots[slot] = link(state, token)
            states.append(state)
        self.states[planned.row], planned.states = state, states
        expected = chain(prefix_root, [*seq.request.prompt_ids, *EXPECTED[seq.seq_id]])
        if seq.finish_reason is FinishReason.ERROR:  # a later step of a sequence whose step failed; its tokens are dropped
            return []
        # Steps that are planned before the end of a sequence is known continue after it.
        assert read[: len(expected)] == expected[:start], "a row reads the tokens of another sequence"
        if not planned.samples:
            return []
        self.newest[planned.row] = known[-1]
        ids: list[int] = []
        if self.dice.random() >= self.p_nothing:
            ids = [sample(states[len(known) - 1], seq.index)]
            while len(ids) <= len(drafts) and drafts[len(ids) - 1] == ids[-1]:
                ids.append(sample(states[len(known) - 1 + len(ids)], seq.index))
            self.newest[planned.row] = ids[-1]
            self.states[planned.row] = states[len(known) - 2 + len(ids)]
        self.num_rejected[seq.seq_id] += 1 + len(drafts) - len(ids)
        return ids

    def applied(self, flight: Flight) -> None:
        """The flight was committed: later plans account for the tokens that it rejected."""
        for planned, ids in zip(flight.rows, flight.ids or (), strict=True):
            if planned.samples:
                self.num_applied[planned.seq.seq_id] += 1 + len(planned.drafts) - len(ids)
