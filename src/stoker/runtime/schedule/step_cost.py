"""The times of steps, as lines through the newest measurements."""

from __future__ import annotations

DECAY = 0.98  # of step times, per step
PREFILL_DECAY = 0.95  # per step with prompts
SAME_SIZE = 0.02  # squared relative deviation of the numbers of prompt tokens, at which the measured line counts as much as the mean
MIN_VARIANCE = 0.25  # of the numbers of tokens; below it, steps of different sizes were not measured


class StepCost:
    """The line base + slope × tokens through the newest step times, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._time = self._tokens_2 = self._product = 0.0

    def record(self, tokens: int, duration_s: float) -> None:
        """Add a step of `tokens` tokens. A time above three times the mean counts as that, because the machine was busy otherwise."""
        if self._weight:
            duration_s = min(duration_s, 3.0 * self._time / self._weight)
        self._weight = self._weight * DECAY + 1.0
        self._tokens = self._tokens * DECAY + tokens
        self._time = self._time * DECAY + duration_s
        self._tokens_2 = self._tokens_2 * DECAY + tokens * tokens
        self._product = self._product * DECAY + tokens * duration_s

    def base_by_slope(self, unknown: float) -> float:
        """base ÷ slope, in tokens: how many tokens cost as much as an empty step. At least 0; `unknown` before sizes were compared."""
        slope = self._slope()
        if slope is None:
            return unknown
        if slope <= 0.0:
            return 1e6
        return max(self._time / self._weight / slope - self._tokens / self._weight, 0.0)

    def seconds(self, tokens: int) -> float:
        """The predicted time of a step of `tokens` tokens; 0 before the first measurement."""
        if not self._weight:
            return 0.0
        mean, slope = self._time / self._weight, self._slope() or 0.0
        return max(mean + max(slope, 0.0) * (tokens - self._tokens / self._weight), 0.0)

    def _slope(self) -> float | None:
        """The seconds of one more token; None if steps of different sizes were not measured."""
        if not self._weight:
            return None
        mean_tokens, mean_time = self._tokens / self._weight, self._time / self._weight
        variance = self._tokens_2 / self._weight - mean_tokens**2
        if variance < MIN_VARIANCE or mean_time <= 0.0:
            return None
        return (self._product / self._weight - mean_tokens * mean_time) / variance


class PrefillCost:
    """What P prompt tokens add to the time of a step: the line base + slope × P through the newest measurements.

    A GPU needs a minimum time for a few tokens, and a chunk costs more the longer its context is. When all measured steps have about the
    same P, the line cannot be known, and its slope is then that of the line through the origin (ridge regression towards it, with the
    weight SAME_SIZE). So the choice of P converges although the true curve is not a line.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._time = self._tokens_2 = self._product = 0.0

    def record(self, tokens: int, excess_s: float) -> None:
        """Add a step with `tokens` prompt tokens. A time above three times the predicted one counts as that."""
        if self._weight:
            excess_s = min(excess_s, 3.0 * max(self.seconds(tokens), self._time / self._weight))
        self._weight = self._weight * PREFILL_DECAY + 1.0
        self._tokens = self._tokens * PREFILL_DECAY + tokens
        self._time = self._time * PREFILL_DECAY + excess_s
        self._tokens_2 = self._tokens_2 * PREFILL_DECAY + tokens * tokens
        self._product = self._product * PREFILL_DECAY + tokens * excess_s

    @property
    def per_token_s(self) -> float:
        """The mean seconds per prompt token; tiny before the first measurement."""
        return max(self._time / self._tokens, 1e-9) if self._tokens else 1e-9

    def seconds(self, tokens: int) -> float:
        """The predicted excess of a step with `tokens` prompt tokens."""
        if not self._weight:
            return tokens * 1e-9
        return max(self._time / self._weight + self._slope() * (tokens - self._tokens / self._weight), 0.0)

    def tokens(self, excess_s: float) -> float:
        """The number of prompt tokens with which the excess is `excess_s`."""
        if not self._weight:
            return excess_s / 1e-9
        return self._tokens / self._weight + (excess_s - self._time / self._weight) / self._slope()

    def _slope(self) -> float:
        mean_tokens, mean_time = self._tokens / self._weight, self._time / self._weight
        ridge = SAME_SIZE * mean_tokens**2
        variance = self._tokens_2 / self._weight - mean_tokens**2
        covariance = self._product / self._weight - mean_tokens * mean_time
        return max((covariance + ridge * self.per_token_s) / (variance + ridge), 0.25 * self.per_token_s)
