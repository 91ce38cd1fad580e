"""The times of steps, as lines through the newest measurements."""

from __future__ import annotations

DECAY = 0.98  # of step times, per step
PREFILL_DECAY = 0.95  # per step with prompts
SAME_SIZE = 0.02  # squared relative deviation of the numbers of prompt tokens, at which the measured line counts as much as the mean
TINY_S = 1e-9  # of a prompt token, before any was measured
MIN_VARIANCE = 0.25  # of the numbers of tokens; below it, steps of different sizes were not measured


class _Sums:
    """Decayed sums of (tokens, seconds) of steps, of which the older ones count less: what a line through them needs."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weight = self._tokens = self._time = self._tokens_2 = self._product = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        self.weight = self.weight * self.decay + 1.0
        self._tokens = self._tokens * self.decay + tokens
        self._time = self._time * self.decay + seconds
        self._tokens_2 = self._tokens_2 * self.decay + tokens * tokens
        self._product = self._product * self.decay + tokens * seconds

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens. As the other properties, only after the first step."""
        return self._tokens / self.weight

    @property
    def mean_time(self) -> float:
        """The mean number of seconds."""
        return self._time / self.weight

    @property
    def variance(self) -> float:
        """The variance of the numbers of tokens."""
        return self._tokens_2 / self.weight - self.mean_tokens**2

    @property
    def covariance(self) -> float:
        """The covariance of tokens and seconds."""
        return self._product / self.weight - self.mean_tokens * self.mean_time


class StepCost:
    """The line base + slope × tokens through the newest step times, by weighted least squares."""

    def __init__(self) -> None:
        self._sums = _Sums(DECAY)

    def record(self, tokens: int, duration_s: float) -> None:
        """Add a step of `tokens` tokens. A time above three times the mean counts as that, because the machine was busy otherwise."""
        if self._sums.weight:
            duration_s = min(duration_s, 3.0 * self._sums.mean_time)
        self._sums.add(tokens, duration_s)

    def base_by_slope(self, unknown: float) -> float:
        """base ÷ slope, in tokens: how many tokens cost as much as an empty step. At least 0; `unknown` before sizes were compared."""
        slope = self._slope()
        if slope is None:
            return unknown
        if slope <= 0.0:
            return 1e6
        return max(self._sums.mean_time / slope - self._sums.mean_tokens, 0.0)

    def seconds(self, tokens: int) -> float:
        """The predicted time of a step of `tokens` tokens; 0 before the first measurement."""
        if not self._sums.weight:
            return 0.0
        return max(self._sums.mean_time + max(self._slope() or 0.0, 0.0) * (tokens - self._sums.mean_tokens), 0.0)

    def _slope(self) -> float | None:
        """The seconds of one more token; None if steps of different sizes were not measured."""
        sums = self._sums
        if not sums.weight or sums.variance < MIN_VARIANCE or sums.mean_time <= 0.0:
            return None
        return sums.covariance / sums.variance


class PrefillCost:
    """What P prompt tokens add to the time of a step: the line base + slope × P through the newest measurements.

    A GPU needs a minimum time for a few tokens, and a chunk costs more the longer its context is. When all measured steps have about the
    same P, the line cannot be known, and its slope is then that of the line through the origin (ridge regression towards it, with the
    weight SAME_SIZE). So the choice of P converges although the true curve is not a line.
    """

    def __init__(self) -> None:
        self._sums = _Sums(PREFILL_DECAY)

    def record(self, tokens: int, excess_s: float) -> None:
        """Add a step with `tokens` prompt tokens. A time above three times the predicted one counts as that."""
        if self._sums.weight:
            excess_s = min(excess_s, 3.0 * max(self.seconds(tokens), self._sums.mean_time))
        self._sums.add(tokens, excess_s)

    @property
    def per_token_s(self) -> float:
        """The mean seconds per prompt token; tiny before the first measurement."""
        return max(self._sums.mean_time / self._sums.mean_tokens, TINY_S) if self._sums.weight else TINY_S

    def seconds(self, tokens: int) -> float:
        """The predicted excess of a step with `tokens` prompt tokens."""
        if not self._sums.weight:
            return tokens * TINY_S
        return max(self._sums.mean_time + self._slope() * (tokens - self._sums.mean_tokens), 0.0)

    def tokens(self, excess_s: float) -> float:
        """The number of prompt tokens with which the excess is `excess_s`."""
        if not self._sums.weight:
            return excess_s / TINY_S
        return self._sums.mean_tokens + (excess_s - self._sums.mean_time) / self._slope()

    def _slope(self) -> float:
        """The seconds of one more prompt token."""
        ridge = SAME_SIZE * self._sums.mean_tokens**2
        slope = (self._sums.covariance + ridge * self.per_token_s) / (self._sums.variance + ridge)
        return max(slope, 0.25 * self.per_token_s)
