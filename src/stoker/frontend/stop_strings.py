"""Stop strings, found in text as it comes: no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Feed text in any pieces; the outcome is the same. The match is the one that ends first, of equals the longest.

    That is the only choice that does not depend on how the text was cut, as nothing is generated past the match.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._reach = max(map(len, stops), default=1) - 1  # characters that can belong to an unfinished match
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now. After a match (`matched`), nothing more is. Unarmed text cannot complete a match."""
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        if armed and (shown := self._find(text, num_held)) is not None:
            return shown
        start = self._first_possible(text)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """What was held back, at the end of a sequence that no stop string ended."""
        held, self._held = ("", "") if self.matched is not None else (self._held, "")
        return held

    def _find(self, text: str, num_old: int) -> str | None:
        """What to show up to the first match that ends after the `num_old` characters that are no news; None without a match."""
        best_end = len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)), best_end)
            if start >= 0 and start + len(stop) < best_end:
                best_end, self.matched = start + len(stop), stop
        if self.matched is None:
            return None
        return text[: best_end if self._include_stop else best_end - len(self.matched)]

    def _first_possible(self, text: str) -> int:
        """Where the longest end of `text` that begins some stop string begins; never a whole stop string."""
        for start in range(max(0, len(text) - self._reach), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
