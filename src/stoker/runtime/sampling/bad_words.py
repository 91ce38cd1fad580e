"""Bad words: token sequences that are never completed."""

from __future__ import annotations

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Ban


class BadWords(Ban):
    """Bans the last token of each bad word when the newest tokens are those before it.

    It reads tokens on the host. The scheduler plans no step of such a sequence while an id is pending (Sequence.waits_for_ids).
    """

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def banned(self, seq: Sequence) -> list[int]:
        """The last token of each bad word whose other tokens are the newest ones of the sequence."""
        return [word[-1] for word in seq.params.bad_word_ids if _completes(seq, word)]


def _completes(seq: Sequence, word: tuple[int, ...]) -> bool:
    """Whether the last token of `word` would complete it now."""
    lead = len(word) - 1
    return lead == 0 or (len(seq.tokens) - seq.num_prompt >= lead and tuple(seq.tokens[-lead:]) == word[:-1])
