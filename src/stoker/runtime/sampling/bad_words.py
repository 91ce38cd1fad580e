"""Bad words: token sequences that are never completed."""

from __future__ import annotations

from stoker.base.types import SamplingParams
from stoker.runtime.sampling.feature import Ban, SampledRow


class BadWords(Ban):
    """Bans the last token of each bad word when the newest tokens are those before it.

    It reads tokens on the host. The scheduler plans no step of such a sequence while an id is pending (Sequence.waits_for_ids).
    """

    reads_tokens = True

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def banned(self, row: SampledRow) -> list[int]:
        """The last token of each bad word whose other tokens are the newest ones before the row."""
        return [word[-1] for word in row.seq.params.bad_word_ids if len(word) == 1 or row.newest(len(word) - 1) == word[:-1]]
