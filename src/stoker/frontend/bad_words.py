"""Bad words: words that must not be generated, converted to token ids."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.errors import RequestError
from stoker.frontend.service import Service

MAX_WORDS = 1024  # each is tokenized twice, 20 µs each time; the event loop is blocked meanwhile
MAX_CHARS = 64 << 10  # of all words together


def bad_word_ids(field: str, words: Sequence[str], service: Service) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, both as it is written and after a space, because the tokens differ. `field` is its name in errors.

    Duplicates are removed. Raises RequestError for too many words.
    """
    check_words(field, words)
    spellings = [spelling for word in words for spelling in dict.fromkeys((word, " " + word.lstrip(" ")))]
    return tuple(dict.fromkeys(tuple(service.encode(spelling, add_special_tokens=False)) for spelling in spellings))


def check_words(field: str, words: Sequence[str]) -> None:
    """Raise RequestError for more words or characters than can be tokenized without delaying other requests."""
    if len(words) > MAX_WORDS:
        raise RequestError(field, list(words), f"there are {len(words)} words, and the limit is {MAX_WORDS}", cure="Send fewer.")
    if (size := sum(map(len, words))) > MAX_CHARS:
        raise RequestError(
            field, list(words), f"the words have {size} characters together, and the limit is {MAX_CHARS}", cure="Send fewer."
        )
