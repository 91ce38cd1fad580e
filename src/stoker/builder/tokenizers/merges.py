"""Merges of a vocabulary: all divisions of its tokens into two other tokens, found in a bounded time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from stoker.base.errors import CheckpointError

MAX_TOKEN_LENGTH = 4096  # characters
# The cost of all comparisons, in characters. 262,144 tokens of 8 characters cost 132 million; this limit is about 10 s.
MAX_COST = 1 << 32
COMPARISON_COST = 64  # of a comparison in addition to its characters

Token = TypeVar("Token", str, bytes)


def divisions(vocabulary: Mapping[Token, int]) -> Iterator[tuple[Token, Token, Token]]:
    """(token, left part, right part) of each division of a token into two tokens, in the order of `vocabulary`.

    Only lengths that tokens have are compared, so that one long token costs little. Raises CheckpointError before the comparison for a
    token of more than MAX_TOKEN_LENGTH characters, and when the cost is above MAX_COST: it is quadratic in the length.
    """
    longest = max(vocabulary, key=len, default="")
    if len(longest) > MAX_TOKEN_LENGTH:
        problem = f"a token of the vocabulary has {len(longest)} characters ({longest[:20]!r}...)"
        raise CheckpointError(f"{problem}.", cure=f"At most {MAX_TOKEN_LENGTH} are supported. Name another tokenizer with --tokenizer.")
    lengths = sorted({len(token) for token in vocabulary})
    exists = frozenset(lengths)
    cuts = {size: [cut for cut in lengths if cut < size and size - cut in exists] for size in lengths}
    cost = sum((COMPARISON_COST + len(token)) * len(cuts[len(token)]) for token in vocabulary)
    if cost > MAX_COST:
        raise CheckpointError(
            f"the {len(vocabulary)} tokens of the vocabulary are too long (at most {len(longest)} characters: {longest[:20]!r}...): to "
            f"find its merges would cost {cost} comparisons of characters, and the limit is {MAX_COST}.",
            cure="Name another tokenizer with --tokenizer.",
        )
    for token in vocabulary:
        for cut in cuts[len(token)]:
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield token, left, right
