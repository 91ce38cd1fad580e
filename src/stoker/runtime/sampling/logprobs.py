"""Log-probabilities: computed on the device, read with a step's other results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.kernels import ops
from stoker.runtime.staging import fetch


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of some rows: chosen [n], best [n, k] with ids [n, k]."""

    chosen: Tensor
    best: Tensor
    ids: Tensor

    def fetch(self) -> Logprobs:
        """The same on their way to the host."""
        return Logprobs(fetch(self.chosen), fetch(self.best), fetch(self.ids))

    def read(self, token_ids: Sequence[int], num_tops: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """As the host tells them, once they are there: each row's token, and as many of the best as it wanted; None wants nothing."""
        rows = zip(token_ids, num_tops, self.chosen.tolist(), self.ids.tolist(), self.best.tolist(), strict=True)
        return [
            None if wanted is None else TokenLogprobs(token, chosen, list(zip(ids[:wanted], best[:wanted], strict=True)))
            for token, wanted, chosen, ids, best in rows
        ]


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids` [L] and of the best `num_top` under logits [L, V]."""
    return Logprobs(*ops.logprobs(logits, token_ids.clamp(min=0), min(num_top, logits.shape[1])))
