"""Chooses how many prompt tokens a step computes beside its decodes, from latency targets and the measured times of earlier steps.

A decode waits for the whole step that contains it. A step of R decodes and P prompt tokens takes about

    decode(R) + excess(P)

Both are lines through measured times: decode(R) through steps without prompts (StepCost), excess(P) through what the other steps took
longer (PrefillCost).

- With a target of the inter-token latency, P is the largest number for which the step ends in time. Times vary, and a few are much longer.
  The margin is therefore not computed from a variance, but follows the steps that were planned to end shortly before the target: each
  one that exceeds it enlarges the margin, and each other one reduces it by so little that the fraction EXCEEDING of them exceeds it. A
  stall, which no number of prompt tokens would have avoided, does not count.
- With only a target of the time to the first token, P is the smallest number for which the prompts that wait are computed in time. The
  inter-token latency is as low as this allows.

Without a decode that waits, the planner sets no limit but `max_num_tokens`. A prompt that cannot reach its target any more waits behind
those that can, as if it had arrived LATE_FACTOR targets later.
"""

from __future__ import annotations

import math

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.step_cost import PrefillCost, StepCost

EXCEEDING = 0.005  # of the steps near the target exceed it; the 99th percentile of a token's time is then below it
MARGIN_STEP = 0.02  # by which a step that exceeds the target enlarges the margin, as a fraction of the planned time
FIRST_MARGIN, MAX_MARGIN = 0.1, 0.6
STALL = 3.0  # times the predicted time: such a step waited for something else, such as the first capture of its graph
NEAR = 0.8  # of the planned time: a step that is predicted to take less says nothing about the margin
FIRST_PREFILL = 256  # prompt tokens before any were measured; afterwards at most twice as many as were measured
MIN_PREFILL = 16  # prompt tokens that a step computes even if the target cannot be reached, so that prompts proceed
DECAY = 0.9  # of the mean time of a step with prompts, per step
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
        self._decode, self._excess = StepCost(), PrefillCost()
        self._margin = FIRST_MARGIN
        self._step_target_s = math.inf  # of the newest step with decodes
        self._prefill_step_s = 0.0  # mean time of a step with prompts
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
            self._step_target_s = self._target_itl_s / num_steps
            prefill = self._excess.tokens(self._step_target_s / (1.0 + self._margin) - self._decode.seconds(num_decodes))
        else:
            prefill = self._pace(num_decodes, num_waiting_tokens, oldest_arrival, now)
        prefill = max(min(prefill, 2.0 * self._largest), MIN_PREFILL)
        self.limit = min(num_decodes + int(prefill), self.max_num_tokens)
        return self.limit

    def is_late(self, seq: Sequence, num_tokens: int, now: float) -> bool:
        """Whether a waiting sequence cannot reach the target of the time to the first token. `num_tokens`: those that are not cached."""
        if self._target_ttft_s is None or seq.num_preemptions:
            return False
        # A prompt may begin in one step and end in the next.
        prefill_s = max(num_tokens * self._excess.per_token_s, 2.0 * self._prefill_step_s)
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
        planned_s = self._step_target_s / (1.0 + self._margin)
        predicted_s = decode_s + self._excess.seconds(num_prefill_tokens)
        if NEAR * planned_s <= predicted_s <= self._step_target_s and duration_s < STALL * predicted_s:
            exceeds = duration_s > self._step_target_s
            self._margin = min(max(self._margin + MARGIN_STEP * (exceeds - EXCEEDING), 0.0), MAX_MARGIN)
        self._excess.record(num_prefill_tokens, max(duration_s - decode_s, 0.0))
        self._prefill_step_s += (duration_s - self._prefill_step_s) * (1.0 - DECAY)
        self._largest = max(self._largest * 0.99, num_prefill_tokens)

    def _pace(self, num_decodes: int, num_waiting_tokens: int, oldest_arrival: float | None, now: float) -> float:
        """The prompt tokens per step with which the oldest prompt, and all others that wait, are computed in PACE targets."""
        assert self._target_ttft_s is not None
        if oldest_arrival is None:
            return 0.0
        left_s = oldest_arrival + PACE * self._target_ttft_s - now
        # In left_s seconds, left_s ÷ (decode + P × seconds of a token) steps compute P tokens each.
        spare_s = left_s - self._excess.per_token_s * num_waiting_tokens
        return math.inf if spare_s <= 0.0 else num_waiting_tokens * self._decode.seconds(num_decodes) / spare_s
