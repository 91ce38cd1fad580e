"""Words that must not be generated, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.errors import RequestError
from stoker.frontend.service import Service

MAX_WORDS = 1024  # each is tokenized twice, at 20 µs, while the process answers nobody else
MAX_CHARS = 64 << 10  # of all of them


def bad_word_ids(field: str, words: Sequence[str], service: Service) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written inside a text and after a space; the tokens differ. Raises RequestError for too many."""
    check_words(field, words)
    spellings = [spelling for word in words for spelling in dict.fromkeys((word, " " + word.lstrip(" ")))]
    return tuple(dict.fromkeys(tuple(service.encode(spelling, add_special_tokens=False)) for spelling in spellings))


def check_words(field: str, words: Sequence[str]) -> None:
    """Raises RequestError for more words, or longer ones, than are tokenized without a pause."""
    if len(words) > MAX_WORDS:
        raise RequestError(field, list(words), f"there are {len(words)} words and at most {MAX_WORDS} are taken", cure="Send fewer.")
    if (size := sum(map(len, words))) > MAX_CHARS:
        raise RequestError(field, list(words), f"the words have {size} characters and at most {MAX_CHARS} are taken", cure="Send fewer.")
