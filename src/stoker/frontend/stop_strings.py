"""Finds stop strings in text that arrives incrementally. Text that may belong to a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Searches text, however it is divided, for stop strings.

    The match is the one that ends first or, of those that end together, the longest. This choice does not depend on the division of the
    text, because nothing is generated after the match.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._max_partial = max(map(len, stops), default=1) - 1  # characters that can belong to an incomplete match
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, can_match: bool = True) -> str:
        """The text that can be emitted now. The call that finds a match returns the text before or with it, later calls none.

        Without `can_match`, no match may end inside `text`.
        """
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        if can_match and (emitted := self._find(text, num_held)) is not None:
            return emitted
        start = self._first_possible(text)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """The text that is still held back, at the end of the sequence; empty after a match."""
        held, self._held = ("", "") if self.matched is not None else (self._held, "")
        return held

    def _find(self, text: str, num_old: int) -> str | None:
        """The text to emit before (or with) the first match, or None without a match.

        The first `num_old` characters were searched before, so no match ends there.
        """
        best_end = len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)), best_end)
            if start >= 0 and start + len(stop) < best_end:
                best_end, self.matched = start + len(stop), stop
        if self.matched is None:
            return None
        return text[: best_end if self._include_stop else best_end - len(self.matched)]

    def _first_possible(self, text: str) -> int:
        """The index of the longest suffix of `text` that begins a stop string without completing it; len(text) if there is none."""
        for start in range(max(0, len(text) - self._max_partial), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
