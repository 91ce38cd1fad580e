"""Which tokens a drafter has computed, so that steps which draft nothing need not run it.

A draft engine needs only token ids. While no sequence of a step can have drafts, as at full load, it does not run, and its cache lacks the
tokens of these steps. When a sequence can have drafts again, the plan lists its missing tokens (`StepPlan.catch_up`), which the draft
engine computes as a chunk before the step. Blocks of the prefix index may lack them, too: `_is_complete` has a flag for each block.

Draft heads read hidden states, which only the step has, so that they run in every step and need no such counts.
"""

from __future__ import annotations

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import NO_DRAFTS, StepPlan


class DrafterProgress:
    """Maintains `Sequence.num_drafter_computed`. A step computes at most `max_num_tokens` missing tokens."""

    def __init__(self, num_blocks: int, tokens_per_block: int, max_num_tokens: int, *, has_state: bool = False) -> None:
        """`has_state`: the drafter has recurrent states, which blocks do not contain."""
        self._has_state = has_state
        self._is_complete = bytearray(num_blocks)  # of the blocks in the prefix index: whether the drafter has computed their tokens
        self._size, self._max_num_tokens = tokens_per_block, max_num_tokens

    def admit(self, seq: Sequence) -> None:
        """Count the tokens of the blocks that an admitted sequence reuses, up to the first one that lacks some."""
        reused = seq.blocks[: seq.num_hashed]
        num_complete = next((i for i, block in enumerate(reused) if not self._is_complete[block]), len(reused))
        seq.num_drafter_computed = 0 if self._has_state else num_complete * self._size

    def is_complete(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the drafter has computed the first `num_tokens` tokens of a sequence."""
        return seq.num_drafter_computed >= num_tokens

    def add(self, plan: StepPlan, limits: list[int]) -> None:
        """Count the tokens of a step in which the drafter runs, and add the missing tokens of rows with a limit above 0 to the plan."""
        missing, room = StepPlan(), self._max_num_tokens
        for seq, start, num_new, limit in zip(plan.sequences, plan.starts, plan.num_new, limits, strict=True):
            count = min(start - seq.num_drafter_computed, room if not self._has_state else self._unpadded_room(missing))
            if limit and count > 0 and start <= len(seq.tokens):
                room -= count
                _add_row(missing, seq, count)
                self._mark(seq, seq.num_drafter_computed, seq.num_drafter_computed + count)
                seq.num_drafter_computed += count
            if seq.num_drafter_computed >= start:
                seq.num_drafter_computed = start + num_new
        if missing.sequences:
            plan.catch_up = missing

    def _unpadded_room(self, missing: StepPlan) -> int:
        """The tokens of one more row with which those of `missing`, padded to the longest one, have max_num_tokens places."""
        room = self._max_num_tokens // (len(missing) + 1)
        return room if room >= max(missing.num_new, default=0) else 0

    def commit(self, seq: Sequence) -> None:
        """Discount the rejected drafts of a sequence whose step is committed."""
        seq.num_drafter_computed = min(seq.num_drafter_computed, seq.num_computed)

    def index(self, seq: Sequence, num_hashed: int) -> None:
        """Set the flags of the blocks that entered the prefix index, of which `num_hashed` were in it before."""
        for i in range(num_hashed, seq.num_hashed):
            self._is_complete[seq.blocks[i]] = seq.num_drafter_computed >= (i + 1) * self._size

    def _mark(self, seq: Sequence, start: int, end: int) -> None:
        """Set the flags of blocks in the prefix index whose last missing tokens are from `start` to `end`."""
        for i in range(start // self._size, min(end // self._size, seq.num_hashed)):
            self._is_complete[seq.blocks[i]] = 1


def _add_row(plan: StepPlan, seq: Sequence, count: int) -> None:
    """Add a row with the next `count` missing tokens of a sequence."""
    plan.sequences.append(seq)
    plan.starts.append(seq.num_drafter_computed)
    plan.num_new.append(count)
    plan.samples.append(False)
    plan.drafts.append(NO_DRAFTS)
    plan.parents.append(NO_DRAFTS)
    plan.num_tokens += count
    plan.num_prefill_tokens += count
