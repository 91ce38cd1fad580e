"""Words that must not be generated, as token ids."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.frontend.service import Service


def bad_word_ids(words: Iterable[str], service: Service) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written inside a text and after a space; the tokens differ."""
    spellings = [spelling for word in words for spelling in dict.fromkeys((word, " " + word.lstrip(" ")))]
    return tuple(dict.fromkeys(tuple(service.encode(spelling, add_special_tokens=False)) for spelling in spellings))
