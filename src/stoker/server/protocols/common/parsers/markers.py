"""Searching markers in text that arrives in chunks."""

from __future__ import annotations


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest marker in `text` as (index, marker); None if there is none."""
    found = [(index, marker) for marker in markers if (index := text.find(marker)) >= 0]
    return min(found, default=None)


def partial_marker_start(text: str, *markers: str) -> int:
    """The index at which a suffix of `text` starts that is a proper prefix of a marker; len(text) if there is none.

    The text from this index on may become the marker, so it is held back. The longest such suffix counts.
    """
    longest = max(len(marker) for marker in markers)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if text[start:] and any(len(text) - start < len(marker) and marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def is_partial(text: str, *markers: str) -> bool:
    """Whether `text` is a proper prefix of a marker, so that more text decides whether it is one. Empty text is."""
    return any(len(text) < len(marker) and marker.startswith(text) for marker in markers)
