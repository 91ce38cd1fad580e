"""An index of a text in token ids: where the newest tokens occurred before, in constant time per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from stoker.base.config import LOOKUP_SIZES

TRUSTED = 5  # equal tokens after which a continuation is returned without a limit
LONGEST = 1 << 10
WINDOW = 8  # tokens in which a copy may differ from a trusted passage before it is continued


class TokenIndex:
    """Finds the continuation of the newest tokens in a text that grows.

    Each run of LOOKUP_SIZES tokens is in a hash table with the position after its last occurrence. While the tokens that follow agree
    with a continuation, it is continued without a search, so that a copied passage is not lost where its words occur several times. The
    more tokens agree, the more tokens of the continuation are returned, because short agreements are often accidents.

    A trusted passage of which a token was copied since then is continued at the first token that agrees again after a difference.
    """

    def __init__(self, text: Iterable[int] = (), *, start: int = -1) -> None:
        """`start`: the position of the text at which the first token is expected; -1: nowhere."""
        self.text: list[int] = []
        self._tables: list[dict[tuple[int, ...], int]] = [{} for _ in LOOKUP_SIZES]
        self._num_indexed = [0] * len(LOOKUP_SIZES)  # ends of the runs in each table
        self.append(text)
        self._next = start
        self._num_equal = TRUSTED if start >= 0 else 0  # tokens before the continuation that agree with the newest ones
        self._difference = -1  # the position of the first token of a trusted passage that its copy lacks; -1: none
        self._num_different = 0  # newest tokens since then

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the end of the text."""
        self.text += token_ids
        text = self.text
        for i, (size, table) in enumerate(zip(LOOKUP_SIZES, self._tables, strict=True)):
            # A run is indexed when a token follows it.
            first = max(self._num_indexed[i], size)
            if first < len(text):
                runs = zip(*(text[first - size + offset : len(text) - size + offset] for offset in range(size)), strict=True)
                table.update(zip(runs, count(first)))
                self._num_indexed[i] = len(text)

    def follow(self, token_ids: Sequence[int], newest: Sequence[int]) -> None:
        """Set the continuation after `token_ids` were generated. `newest` are at least the last max(LOOKUP_SIZES) tokens, if there are.

        The text may contain `token_ids` already.
        """
        text = self.text
        for token in token_ids:
            if 0 <= self._next < len(text) and text[self._next] == token:
                self._next, self._num_equal, self._difference = self._next + 1, self._num_equal + 1, -1
                continue
            if self._num_equal > TRUSTED and 0 <= self._next < len(text):
                self._difference, self._num_different = self._next, 0
            self._next, self._num_equal = -1, 0
            self._num_different += 1
        if self._next < 0 or self._next >= len(text):
            self._find(newest)
            if self._next < 0 and self._difference >= 0 and self._num_different <= WINDOW:
                self._resume(newest[-1])

    def continuation(self, limit: int) -> list[int]:
        """At most `limit` tokens that followed the newest ones in the text."""
        limit = min(limit, self._limit)
        return self.text[self._next : self._next + limit] if self._next >= 0 else []

    def repetition(self, limit: int) -> list[int]:
        """The same for a text that ends with the newest tokens: the tokens between the two occurrences are repeated up to `limit`."""
        found = self.continuation(limit)
        limit = min(limit, self._limit)
        return (found * -(-limit // len(found)))[:limit] if found else found

    @property
    def _limit(self) -> int:
        """The number of tokens of the continuation that are likely enough."""
        return LONGEST if self._num_equal >= TRUSTED else 2 * self._num_equal

    def _find(self, newest: Sequence[int]) -> None:
        """Continue after the last occurrence of the newest tokens."""
        self._next, self._num_equal = -1, 0
        for size, table in zip(LOOKUP_SIZES, self._tables, strict=True):
            if len(newest) >= size and (found := table.get(tuple(newest[-size:]))) is not None:
                self._next, self._num_equal = found, size
                return

    def _resume(self, newest: int) -> None:
        """Continue the passage that the copy left at `_difference`, after its next token that equals the newest one."""
        end = min(self._difference + WINDOW, len(self.text) - 1)
        for position in range(self._difference, end):
            if self.text[position] == newest:
                self._next, self._num_equal = position + 1, 1
                return
