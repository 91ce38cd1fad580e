"""Searching markers in text that arrives in chunks."""

from __future__ import annotations


def partial_marker_start(text: str, marker: str) -> int:
    """The index at which a suffix of `text` starts that is a proper prefix of `marker`; len(text) if there is none.

    The text from this index on may become the marker, so it is held back. The longest such suffix counts.
    """
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)
