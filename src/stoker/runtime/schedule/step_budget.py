"""Chooses how many prompt tokens a step computes beside its decodes, from latency targets and the measured times of earlier steps.

A decode waits for the whole step that contains it. A step of R decodes and P prompt tokens takes about

    decode(R) + slope × P

decode(R) is the line through the times of steps without prompts (StepCost). The slope is the sum of the other steps' excess over it,
divided by the sum of their prompt tokens, of which older ones count less. It is measured near the chosen P, so that the choice converges
although the true curve is not a line: a GPU needs a minimum time for a few tokens, and a chunk costs more the longer its context is.

- With a target of the inter-token latency, P is the largest number for which the step ends in time. The relative error of earlier
  predictions is the margin: MARGIN standard deviations, so that 99 of 100 steps are below the target.
- With only a target of the time to the first token, P is the smallest number for which the prompts that wait are computed in time. The
  inter-token latency is as low as this allows.

Without a decode that waits, the planner sets no limit but `max_num_tokens`. A prompt that cannot reach its target any more waits behind
those that can, as if it had arrived LATE_FACTOR targets later.
"""

from __future__ import annotations

import math

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.step_cost import StepCost

MARGIN = 2.4  # standard deviations; 2.33 is the 99th percentile of a normal distribution
FIRST_PREFILL = 256  # prompt tokens before any were measured; afterwards at most twice as many as were measured
MIN_PREFILL = 16  # prompt tokens that a step computes even if the target cannot be reached, so that prompts proceed
DECAY = 0.9  # of the measurements, per step with prompts
PACE = 0.7  # fraction of the target of the time to the first token in which the waiting prompts shall be computed
LATE_FACTOR = 10.0


class StepBudget:
    """The limit of the tokens of each step, at most `max_num_tokens`."""

    def __init__(self, max_num_tokens: int, *, target_itl_s: float | None = None, target_ttft_s: float | None = None) -> None:
        self.max_num_tokens = max_num_tokens
        self.limit = max_num_tokens  # of the newest step with decodes
        self._target_itl_s = target_itl_s
        self._target_ttft_s = target_ttft_s
        self.has_target = target_itl_s is not None or target_ttft_s is not None  # without a target, nothing is measured
        self._decode = StepCost()
        self._excess = self._prefill_tokens = self._error_2 = 0.0  # decayed sums of seconds, tokens, and squared relative errors
        self._weight = self._prefill_step_s = 0.0  # mean time of a step with prompts
        self._largest = FIRST_PREFILL / 2

    def num_tokens(self, num_decodes: int, num_decoding: int, num_waiting_tokens: int, oldest_arrival: float | None, now: float) -> int:
        """The limit for a step with `num_decodes` of the `num_decoding` sequences that wait for their next token.

        If a step has only a part of them, because of pipeline stages or of more sequences than rows, each token takes several steps, which
        share the target.

        `num_waiting_tokens` prompt tokens are to be computed, and the oldest of their sequences arrived at `oldest_arrival`; None if there
        is none. `now` is in monotonic seconds.
        """
        if self._target_itl_s is not None:
            num_steps = -(-num_decoding // num_decodes) if num_decodes else 1
            target_s = self._target_itl_s / num_steps / (1.0 + MARGIN * self._deviation())
            prefill = (target_s - self._decode.seconds(num_decodes)) / self._slope()
        else:
            prefill = self._pace(num_decodes, num_waiting_tokens, oldest_arrival, now)
        prefill = max(min(prefill, 2.0 * self._largest), MIN_PREFILL)
        self.limit = min(num_decodes + int(prefill), self.max_num_tokens)
        return self.limit

    def is_late(self, seq: Sequence, num_tokens: int, now: float) -> bool:
        """Whether a waiting sequence cannot reach the target of the time to the first token. `num_tokens`: those that are not cached."""
        if self._target_ttft_s is None or seq.num_preemptions:
            return False
        prefill_s = max(num_tokens * self._slope(), 2.0 * self._prefill_step_s)  # a prompt may begin in one step and end in the next
        return now + prefill_s > seq.arrival + self._target_ttft_s

    @property
    def delay_s(self) -> float:
        """How much later a late prompt counts as having arrived."""
        return LATE_FACTOR * (self._target_ttft_s or 0.0)

    def record(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """Add the time of a step."""
        if not self.has_target:
            return
        if not num_prefill_tokens:
            self._decode.record(num_decodes, duration_s)
            return
        decode_s = self._decode.seconds(num_decodes)
        if self._prefill_tokens:
            predicted = decode_s + self._slope() * num_prefill_tokens
            duration_s = min(duration_s, 3.0 * predicted)
            if num_prefill_tokens * 2 > self._largest:  # the error of small steps says nothing about those at the limit
                self._weight = self._weight * DECAY + 1.0
                self._error_2 = self._error_2 * DECAY + (duration_s / predicted - 1.0) ** 2
        self._prefill_step_s += (duration_s - self._prefill_step_s) * (1.0 - DECAY)
        self._excess = self._excess * DECAY + max(duration_s - decode_s, 0.0)
        self._prefill_tokens = self._prefill_tokens * DECAY + num_prefill_tokens
        self._largest = max(self._largest * 0.99, num_prefill_tokens)

    def _pace(self, num_decodes: int, num_waiting_tokens: int, oldest_arrival: float | None, now: float) -> float:
        """The prompt tokens per step with which the oldest prompt, and all others that wait, are computed in PACE targets."""
        assert self._target_ttft_s is not None
        if oldest_arrival is None:
            return 0.0
        left_s = oldest_arrival + PACE * self._target_ttft_s - now
        # In left_s seconds, left_s ÷ (decode + slope × P) steps compute P tokens each.
        spare_s = left_s - self._slope() * num_waiting_tokens
        return math.inf if spare_s <= 0.0 else num_waiting_tokens * self._decode.seconds(num_decodes) / spare_s

    def _slope(self) -> float:
        """The seconds of a prompt token beside decodes."""
        return max(self._excess / self._prefill_tokens, 1e-9) if self._prefill_tokens else 1e-9

    def _deviation(self) -> float:
        """The standard deviation of the time of a step from its prediction, relative to that."""
        return min(math.sqrt(self._error_2 / self._weight), 0.5) if self._weight else 0.0
