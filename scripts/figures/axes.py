"""Curves over a logarithmic axis, and groups of bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from svg import Drawing

Points = list[tuple[float, float]]
BAR_COLOURS = ("strong-blue", "strong-rose", "strong-grey")


class Axes:
    """A plot area with a logarithmic x axis that is labelled at `ticks`, and a linear y axis with a line every `step`."""

    def __init__(
        self, d: Drawing, x: float, y: float, width: float, height: float, ticks: Sequence[float], limits: tuple[float, float], step: float
    ) -> None:
        self.d = d
        self.x, self.y, self.width, self.height = x, y, width, height
        self.ticks = ticks
        self.low, self.high = limits
        self.labels: list[tuple[str, str, str]] = []
        for number in range(round((self.high - self.low) / step) + 1):
            value = self.low + number * step
            d.line((x, self._y(value)), (x + width, self._y(value)), colour="grid", width=1)
            d.text(x - 8, self._y(value) + 4, f"{value:g}", "small soft end")
        for tick in ticks:
            d.text(self._x(tick), y + height + 18, f"{tick:g}", "small soft middle")

    def heading(self, text: str) -> None:
        self.d.text(self.x, self.y - 22, text, "bold")

    def curve(self, label: str, points: Points, colour: str, dash: str = "") -> None:
        """A curve with its label at its last point, in the colour of the curve."""
        self.d.line(*((self._x(x), self._y(y)) for x, y in points), colour=colour, width=2.2, dash=dash)
        if not dash:
            for x, y in points:
                self.d.dot(self._x(x), self._y(y), colour)
        self._legend(label, colour, dash)

    def _legend(self, label: str, colour: str, dash: str) -> None:
        column, row = divmod(len(self.labels), 3)
        x, y = self.x + 12 + 172 * column, self.y + 12 + 18 * row
        self.d.line((x, y - 4), (x + 24, y - 4), colour=colour, width=2.2, dash=dash)
        self.d.text(x + 31, y, label, "small")
        self.labels.append((label, colour, dash))

    def _x(self, value: float) -> float:
        first, last = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return round(self.x + self.width * (math.log(value) - first) / (last - first), 1)

    def _y(self, value: float) -> float:
        return round(self.y + self.height * (self.high - value) / (self.high - self.low), 1)


def draw_bars(d: Drawing, x: float, heading: str, sides: dict[str, dict[str, float]], maximum: float) -> None:
    """One group of horizontal bars per key of the sides; one bar per side."""
    d.text(x, 66, heading, "bold")
    y = 84.0
    groups = next(iter(sides.values()))
    for group in groups:
        d.text(x, y + 18, group, "small")
        for number, side in enumerate(sides.values()):
            top = y + 20 * number
            width = round(310 * side[group] / maximum, 1)
            d.rect(x + 88, top, width, 17, BAR_COLOURS[number], outline="", radius=2)
            d.text(x + 94 + width, top + 13, f"{side[group]:,.0f}", "small")
        y += 20 * len(sides) + 14
    left = x
    for number, label in enumerate(sides):
        d.rect(left, 299, 12, 12, BAR_COLOURS[number], outline="", radius=2)
        d.text(left + 18, 309, label, "small")
        left += 34 + 7 * len(label)
