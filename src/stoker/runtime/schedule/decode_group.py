"""The sequences of a simulated scheduler that only decode, advanced by whole steps without visiting each of them.

Each sequence of the group computes one token per step, so that the step in which it next fills a block or ends is known in advance. The
group keeps the sequences by that step; their counters, tokens and blocks are brought up to date there. A step therefore takes a time that
does not depend on the number of its rows.
"""

from __future__ import annotations

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.running_set import RunningSet

UNKNOWN_TOKEN = 7  # the id of every token that a simulation generates


class DecodeGroup:
    """The sequences of a running set that have computed their prompts.

    All of them are in every step, none is preempted, and their answers have max_tokens tokens.

    Without a prefix index they allocate no further blocks, because the contents of no block matter: admission has reserved their blocks,
    and a reserved block is as little available to others as an allocated one.
    """

    def __init__(self, running_set: RunningSet) -> None:
        self._running_set = running_set
        self._size = running_set.kv_cache.tokens_per_block
        self._has_index = running_set.kv_cache.index is not None
        self.num_rows = 0
        self.num_context_tokens = 0  # sum of the positions that the next step computes
        self._clock = 0  # committed steps
        self._due: dict[int, list[tuple[int, Sequence]]] = {}  # step → (place in the order of the running set, sequence)
        self._growing: list[tuple[int, Sequence]] = []  # that need one more block for the next step
        self._num_joined = 0

    def join(self, seq: Sequence) -> None:
        """Add a sequence whose prompt is computed and that has not ended. Prompts are completed in the order of the running set."""
        self.num_rows += 1
        self.num_context_tokens += seq.num_computed
        self._schedule((self._num_joined, seq))
        self._num_joined += 1

    def grow(self) -> None:
        """Allocate the blocks that the next step writes to. Admission has reserved them."""
        if not self._growing:
            return
        for _, seq in sorted(self._growing):
            if not self._running_set.grow(seq):
                raise RuntimeError(f"sequence {seq.seq_id} has no block for its next token")
        self._growing.clear()

    @property
    def num_equal_steps(self) -> int:
        """The number of steps after which the first sequence has ended, or filled a block that is indexed; at least 1."""
        step, due = self._clock + 1, self._due
        if not self.num_rows:
            return 1
        while step not in due:
            step += 1
        return step - self._clock

    def commit(self, num_steps: int) -> list[Sequence]:
        """Commit at most `num_equal_steps` steps. Returns the sequences that end."""
        self._clock += num_steps
        self.num_context_tokens += num_steps * self.num_rows
        if (due := self._due.pop(self._clock, None)) is None:
            return []
        ended = []
        for entry in sorted(due) if len(due) > 1 else due:
            seq = entry[1]
            num_computed = self._next_end(seq)
            seq.tokens += [UNKNOWN_TOKEN] * (num_computed + 1 - len(seq.tokens))
            seq.num_computed = num_computed
            if self._has_index and not num_computed % self._size:
                self._running_set.register(seq, num_computed)
            if num_computed < seq.max_computed:
                self._schedule(entry)
                continue
            self.num_rows -= 1
            self.num_context_tokens -= num_computed
            ended.append(seq)
        return ended

    def _next_end(self, seq: Sequence) -> int:
        """The number of computed tokens after the step for which a sequence is scheduled, which ends a block or the answer."""
        if not self._has_index:
            return seq.max_computed
        return min((seq.num_computed // self._size + 1) * self._size, seq.max_computed)

    def _schedule(self, entry: tuple[int, Sequence]) -> None:
        """Note when a sequence next fills a block or ends, and whether its next token needs a new block."""
        seq = entry[1]
        if self._has_index and seq.num_computed == len(seq.blocks) * self._size:
            self._growing.append(entry)
        step = self._clock + self._next_end(seq) - seq.num_computed
        if (due := self._due.get(step)) is None:
            self._due[step] = [entry]
        else:
            due.append(entry)
