"""Finding marks in text that comes in pieces."""

from __future__ import annotations


def held_from(text: str, mark: str) -> int:
    """Where the longest end of `text` that begins `mark` begins; len(text) when none does. A whole mark is not looked for."""
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            return start
    return len(text)
