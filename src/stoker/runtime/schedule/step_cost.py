"""The time of a step without prefills, as a line through the newest measurements."""

from __future__ import annotations

DECAY = 0.98  # of step times, per step
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
