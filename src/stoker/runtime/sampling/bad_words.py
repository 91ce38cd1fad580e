"""Token sequences that are never completed."""

from __future__ import annotations

from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature


class BadWords(Feature):
    """Bans the last token of each listed sequence whenever the ones before it were just generated.

    It reads tokens on the host: the scheduler plans no step of such a sequence while an id is pending (Sequence.waits_for_ids).
    """

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def add(self, seq: Sequence) -> None:
        return

    def remove(self, seq_id: int) -> None:
        return

    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        for row, seq in sequences:
            banned = [word[-1] for word in seq.params.bad_words if _completes(seq, word)]
            if banned:
                logits[row, banned] = float("-inf")


def _completes(seq: Sequence, word: tuple[int, ...]) -> bool:
    lead = len(word) - 1
    return lead == 0 or (len(seq.tokens) - seq.num_prompt >= lead and tuple(seq.tokens[-lead:]) == word[:-1])
