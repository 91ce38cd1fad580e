"""A series of equal steps that a simulated replica computes."""

from __future__ import annotations

import math

from stoker.runtime.schedule.group_scheduler import GroupPlan


class RunningSteps:
    """Steps that a replica computes one after the other, from `start_s` on. Each takes `growth_s` longer than the one before it."""

    __slots__ = ("count", "first_s", "growth_s", "launched_s", "plan", "start_s")

    def __init__(self, plan: GroupPlan, start_s: float, first_s: float, growth_s: float) -> None:
        self.plan, self.start_s, self.first_s, self.growth_s = plan, start_s, first_s, growth_s
        self.count = plan.num_equal_steps
        self.launched_s = start_s  # when the host has launched the first one

    def launch(self, until_s: float, overlap: bool) -> None:
        """The host has launched the only step at `until_s`, a simulated time in seconds, before which the step does not end.

        With `overlap`, the host plans the next step then.
        """
        self.first_s = max(self.first_s, until_s - self.start_s)
        if overlap:
            self.launched_s = max(self.start_s, until_s)

    def end_s(self, count: int) -> float:
        """When the first `count` steps end."""
        return self.start_s + (count * self.first_s + self.growth_s * (count * (count - 1) // 2))

    @property
    def last_start_s(self) -> float:
        """When the last of the steps begins and is launched. With overlap, the host plans the step after it then."""
        return self.end_s(self.count - 1) if self.count > 1 else self.launched_s

    def stop(self, now_s: float, num_further: int = 0) -> bool:
        """Run `num_further` steps that begin at or after `now_s`, at most. False if there are no more."""
        count = self._last_before(now_s) + num_further
        if count >= self.count:
            return False
        self.count = count
        return True

    def num_ended(self, now_s: float) -> int:
        """The number of steps that have ended before `now_s`."""
        return self._last_before(now_s) - 1

    def _last_before(self, now_s: float) -> int:
        """The number of steps of which the last one is the first that ends at or after `now_s`, or all of them."""
        first_s, growth_s = self.first_s, self.growth_s
        # The smallest count with end_s(count) >= now_s, from the positive root of the quadratic equation, corrected for rounding.
        half, left_s = first_s / growth_s - 0.5 if growth_s else 0.0, max(now_s - self.start_s, 0.0)
        count = math.sqrt(half * half + 2.0 * left_s / growth_s) - half if growth_s else left_s / first_s
        count = max(1, min(math.ceil(count), self.count))
        while count > 1 and self.end_s(count - 1) >= now_s:
            count -= 1
        while count < self.count and self.end_s(count) < now_s:
            count += 1
        return count
