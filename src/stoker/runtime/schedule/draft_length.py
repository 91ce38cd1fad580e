"""Chooses how many draft tokens a sequence verifies: from the measured acceptance of its drafts and the measured cost of a token.

A step of T tokens takes about base + slope × T seconds. With R rows that each have k drafts, of which each is accepted with probability a
if those before it are, the rate of generated tokens is

    rate(k) = R × (1 + a + a² + ... + aᵏ) ÷ (base + slope × R × (1 + k) + k × share × (base + slope × R))

`share` is the time of a draft engine or of draft heads for one draft, relative to that of the model; 0 for drafts from the host.
The chosen k has the largest rate; it is 0 unless that rate is MIN_GAIN × rate(0). On an idle GPU the slope is small, and k is large; at
full load base + slope × R is nearly proportional to R, and drafts do not pay. A sequence whose drafts are rejected has no drafts for a
number of tokens that doubles with each failed attempt. An attempt runs the drafter for the whole step, so that at most one sequence makes
an attempt in ATTEMPT_STEPS steps; for drafts from the host, which cost nothing else, there is no such limit.

The drafts of a tree are ordered by their use. The sum of aⁱ is then that of the measured acceptance of its first k nodes (NodeAcceptance),
times the acceptance of the sequence relative to that of all sequences, and the drafter computes all nodes of each depth at once. With few
nodes, what remains of the tree is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.node_acceptance import NodeAcceptance
from stoker.runtime.schedule.step_cost import StepCost

MIN_GAIN = 1.03
DECAY = 0.98  # of the average acceptance, per step with drafts
FORGET = 0.9  # of a sequence's acceptance, per step with drafts
PRIOR_WEIGHT = 3.0  # drafts that the acceptance of earlier sequences counts for, in a new one
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # tokens without drafts after an attempt that did not pay
ATTEMPT_STEPS = 64  # steps without prefills
ATTEMPT_TOKENS = 4  # tokens of a sequence within which it must verify the draft of an attempt
FLAT = 32.0  # base ÷ slope before steps of different sizes were measured


@dataclass(slots=True)
class Acceptance:
    """The recent drafts of one sequence. Counts are weighted: older ones count less."""

    accepted: float
    tried: float
    pause: int = FIRST_PAUSE  # tokens without drafts after the next attempt that does not pay
    resume_at: int = 0  # number of tokens of the sequence from which it may have drafts again
    num_drafts: int = 0  # all drafts that were verified, and those of them that were accepted
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted if those before it are."""
        return self.accepted / self.tried


class DraftLength:
    """The number of drafts per sequence, at most `max_drafts`. With `is_adaptive` False it is always `max_drafts`.

    `nodes`: the acceptance of the nodes of a tree; None: drafts are chains.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        is_adaptive: bool,
        draft_share: float = 0.0,
        limits_attempts: bool = False,
        nodes: NodeAcceptance | None = None,
    ) -> None:
        """`draft_share`: see above. `limits_attempts`: whether an attempt costs the whole step more than one token."""
        self.max_drafts = max_drafts
        self._draft_share, self._limits_attempts = draft_share, limits_attempts
        self._attempting: Acceptance | None = None  # of the sequence that makes an attempt, if they are limited
        self._next_attempt = 0  # the number of recorded steps from which on the next attempt is made
        self.is_adaptive = is_adaptive
        self.nodes = nodes
        self.cost = StepCost()
        self._average = Acceptance(0.7 * PRIOR_WEIGHT, PRIOR_WEIGHT)  # over all sequences
        self._best: dict[tuple[int, int], int] = {}  # (acceptance in 32nds, rows) → number of drafts
        self._num_recorded = 0
        self.num_steps = self.num_drafts = self.num_accepted = 0  # rows with drafts; drafts; accepted drafts

    def limit(self, seq: Sequence, num_rows: int) -> int:
        """The number of drafts for a sequence in a step of `num_rows` rows."""
        requested = seq.request.max_drafts
        most = self.max_drafts if requested is None else min(requested, self.max_drafts)
        if seq.draft_limit is not None:
            most = min(most, seq.draft_limit)
        if not self.is_adaptive or not most:
            return most
        acceptance, num_tokens = self._acceptance(seq), len(seq.tokens)
        if num_tokens < acceptance.resume_at:
            return 0
        key = (round(acceptance.rate * 32), num_rows)
        if (best := self._best.get(key)) is None:
            best = self._best[key] = self._choose(key[0] / 32, num_rows)
        if best == 0:
            if acceptance.resume_at:  # the pause has ended
                return self._attempt(acceptance, num_tokens)
            acceptance.resume_at = num_tokens + acceptance.pause
        return min(best, most)

    def _attempt(self, acceptance: Acceptance, num_tokens: int) -> int:
        """1 if a sequence of `num_tokens` tokens, whose pause has ended, may have a draft, otherwise 0."""
        if not self._limits_attempts:
            return 1
        if self._attempting is not acceptance:
            if self._num_recorded < self._next_attempt:
                return 0
            self._attempting, self._next_attempt = acceptance, self._num_recorded + ATTEMPT_STEPS
            acceptance.resume_at = num_tokens
        if num_tokens <= acceptance.resume_at + ATTEMPT_TOKENS:
            return 1
        self._attempting, acceptance.resume_at = None, num_tokens + acceptance.pause  # no step could verify the draft
        return 0

    def record(self, seq: Sequence, num_drafts: int, path: Seq[int]) -> None:
        """Count the drafts of a step, whose tokens `seq` has already. `path`: the nodes of the accepted drafts."""
        acceptance, num_accepted = self._acceptance(seq), len(path)
        if self.nodes is not None:
            self.nodes.record(num_drafts, path)
        if self._attempting is acceptance:
            self._attempting = None
        self.num_steps += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        acceptance.num_drafts += num_drafts
        acceptance.num_accepted += num_accepted
        tried = num_accepted + (num_accepted < num_drafts)
        for counts, decay in ((acceptance, FORGET), (self._average, DECAY)):
            counts.accepted = counts.accepted * decay + num_accepted
            counts.tried = counts.tried * decay + tried
        if not acceptance.resume_at:
            return
        if num_accepted:
            acceptance.resume_at, acceptance.pause = 0, FIRST_PAUSE
            acceptance.accepted, acceptance.tried = self._average.rate * PRIOR_WEIGHT + num_accepted, PRIOR_WEIGHT + tried
        else:
            acceptance.pause = min(acceptance.pause * 2, LONGEST_PAUSE)
            acceptance.resume_at = len(seq.tokens) + acceptance.pause

    def _acceptance(self, seq: Sequence) -> Acceptance:
        """The counts of a sequence. A new one begins with the average of all sequences."""
        if seq.acceptance is None:
            seq.acceptance = Acceptance(self._average.rate * PRIOR_WEIGHT, PRIOR_WEIGHT)
        counts: Acceptance = seq.acceptance
        return counts

    def record_step(self, num_tokens: int, duration_s: float) -> None:
        """Count the time of a step without prefills."""
        self.cost.record(num_tokens, duration_s)
        self._num_recorded += 1
        if self._num_recorded % 16 == 0:
            self._best.clear()

    def _choose(self, acceptance: float, num_rows: int) -> int:
        """The number of drafts with the largest rate of tokens."""
        base = self.cost.base_by_slope(FLAT)
        plain = best_rate = 1.0 / (base + num_rows)
        best, expected = 0, 1.0
        for count, probability in enumerate(self._probabilities(acceptance), 1):
            expected += probability
            num_passes = count if self.nodes is None else self.nodes.num_passes
            rate = expected / (base + num_rows * (1 + count) + num_passes * self._draft_share * (base + num_rows))
            if rate > best_rate:
                best, best_rate = count, rate
        return best if best_rate > MIN_GAIN * plain else 0

    def _probabilities(self, acceptance: float) -> Seq[float]:
        """The probability that each draft is accepted, for a sequence with this acceptance."""
        if self.nodes is None:
            return list(accumulate(repeat(acceptance, self.max_drafts), mul))
        scale = acceptance / max(self._average.rate, 0.01)
        return [min(rate * scale, 1.0) for rate in self.nodes.rates]
