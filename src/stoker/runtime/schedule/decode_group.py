"""The sequences of a simulated scheduler that only decode, advanced by whole steps without visiting each of them.

Each sequence of the group computes one token per step, so that the steps in which it fills a block and in which it ends are known in
advance. The group keeps the sequences by those steps; their counters, tokens and blocks are brought up to date there. A step therefore
takes a time that does not depend on the number of its rows.
"""

from __future__ import annotations

from heapq import heappop, heappush

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.running_set import RunningSet

UNKNOWN_TOKEN = 7  # the id of every token that a simulation generates

Entry = tuple[int, Sequence]  # place in the order of the running set, sequence


class _Agenda:
    """Sequences by the step after which something happens to them."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # a heap
        self._entries: dict[int, list[Entry]] = {}

    def add(self, step: int, entry: Entry) -> None:
        """Add a sequence for a step."""
        if (entries := self._entries.get(step)) is None:
            self._entries[step] = [entry]
            heappush(self.steps, step)
        else:
            entries.append(entry)

    def pop(self) -> list[Entry]:
        """Remove the first step. Returns its sequences in the order of the running set."""
        entries = self._entries.pop(heappop(self.steps))
        if len(entries) > 1:
            entries.sort()
        return entries


class DecodeGroup:
    """The sequences of a running set that have computed their prompts.

    All of them are in every step, none is preempted, and their answers have max_tokens tokens.

    Without a prefix index they allocate no further blocks, because the contents of no block matter: admission has reserved their blocks,
    and a reserved block is as little available to others as an allocated one. With an index, full blocks are indexed, and the next ones
    allocated, by `fill_blocks`, which performs this for several steps at once, in the order in which single steps would.

    Without `index_answers`, the tokens of answers are not stored, and blocks that contain a part of an answer are not indexed. They remain
    cached after the end of the sequence, and are evicted like others, but no prompt finds them. That is the same for prompts that contain
    no answer, except that equal prompts get different answers, whose blocks are all cached.
    """

    def __init__(self, running_set: RunningSet, index_answers: bool = True) -> None:
        self._running_set = running_set
        self._size = running_set.kv_cache.tokens_per_block
        self._has_index = running_set.kv_cache.index is not None
        self._index_answers = index_answers
        self.num_rows = 0
        self.num_context_tokens = 0  # sum of the positions that the next step computes
        self._clock = 0  # committed steps
        self._ends, self._fills = _Agenda(), _Agenda()  # steps after which sequences have ended, or have filled a block that is indexed
        self.growing: list[Entry] = []  # that need one more block for the step after the newest one whose blocks are indexed
        self._num_joined = 0

    def join(self, seq: Sequence) -> None:
        """Add a sequence whose prompt is computed and that has not ended. Prompts are completed in the order of the running set."""
        entry = (self._num_joined, seq)
        self._num_joined += 1
        self.num_rows += 1
        num_computed = seq.num_computed
        self.num_context_tokens += num_computed
        num_left = seq.max_computed - num_computed
        self._ends.add(self._clock + num_left, entry)
        if self._has_index:
            if num_computed == len(seq.blocks) * self._size:
                self.growing.append(entry)
            num_missing = self._size - num_computed % self._size
            if num_missing <= num_left:
                self._fills.add(self._clock + num_missing, entry)

    def grow(self) -> None:
        """Allocate the blocks that the step after the newest one whose blocks are indexed writes to. Admission has reserved them."""
        if growing := self.growing:
            if len(growing) > 1:
                growing.sort()
            self._running_set.kv_cache.grow_all([seq for _, seq in growing])
            self.growing = []

    @property
    def num_equal_steps(self) -> int:
        """The number of steps after which the first sequence has ended; at least 1."""
        steps = self._ends.steps
        return steps[0] - self._clock if steps else 1

    @property
    def num_steps_to_fill(self) -> int:
        """The number of steps after which the first block that is indexed is full; 0 if no sequence fills another one."""
        steps = self._fills.steps
        return steps[0] - self._clock if steps else 0

    def fill_blocks(self, num_steps: int) -> None:
        """Index the blocks that are full after `num_steps` further steps, which need not be committed, and allocate the next ones.

        Those that the step after these ones writes to are allocated by `grow`.
        """
        fills, size, last = self._fills, self._size, self._clock + num_steps
        while fills.steps and (step := fills.steps[0]) <= last:
            self.grow()
            for entry in fills.pop():
                seq = entry[1]
                num_computed = (seq.num_computed // size + 1) * size
                if self._index_answers:
                    _advance(seq, num_computed)
                    self._running_set.register(seq, num_computed)
                else:
                    seq.num_computed = num_computed
                if num_computed < seq.max_computed:
                    self.growing.append(entry)
                    if num_computed + size <= seq.max_computed:
                        fills.add(step + size, entry)

    def commit(self, num_steps: int) -> list[Sequence]:
        """Commit at most `num_equal_steps` steps. Returns the sequences that end."""
        if self._fills.steps and self._fills.steps[0] <= self._clock + num_steps:
            if num_steps > 1 and self._fills.steps[0] < self._clock + num_steps:
                self.fill_blocks(num_steps - 1)
            self.grow()
            self.fill_blocks(num_steps)
        else:
            self.grow()
        self._clock += num_steps
        self.num_context_tokens += num_steps * self.num_rows
        ended: list[Sequence] = []
        if self._ends.steps and self._ends.steps[0] == self._clock:
            for _, seq in self._ends.pop():
                if self._index_answers:
                    _advance(seq, seq.max_computed)
                else:
                    seq.num_computed = seq.max_computed
                self.num_rows -= 1
                self.num_context_tokens -= seq.max_computed
                if self._has_index and not self._index_answers:
                    self._cache_answer(seq)
                ended.append(seq)
        return ended

    def _cache_answer(self, seq: Sequence) -> None:
        """Let the full blocks of an answer that is not indexed remain cached after the end of its sequence."""
        self._running_set.kv_cache.pool.mark_reusable(seq.blocks[seq.num_hashed : seq.max_computed // self._size])


def _advance(seq: Sequence, num_computed: int) -> None:
    """Bring the tokens of a sequence up to date: `num_computed` are computed, and one more is known."""
    seq.tokens += [UNKNOWN_TOKEN] * (num_computed + 1 - len(seq.tokens))
    seq.num_computed = num_computed
