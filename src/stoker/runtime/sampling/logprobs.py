"""Log-probabilities, computed on the device and copied to the host with the other results of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.kernels import ops
from stoker.runtime.staging import copy_to_host


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n rows: of the sampled tokens, and of the k most probable tokens with their ids."""

    chosen: Tensor  # float32 [n]
    best: Tensor  # float32 [n, k]
    ids: Tensor  # int32 [n, k]

    def to_host(self) -> Logprobs:
        """Start to copy the tensors to the host. The values are valid when the step has ended."""
        return Logprobs(copy_to_host(self.chosen), copy_to_host(self.best), copy_to_host(self.ids))

    def to_list(self, token_ids: Sequence[int], num_tops: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """The log-probabilities of each row's token and of its `num_tops` most probable tokens, after the copy has ended.

        None for a row whose num_tops is None. `token_ids` are the sampled tokens.
        """
        rows = zip(token_ids, num_tops, self.chosen.tolist(), self.ids.tolist(), self.best.tolist(), strict=True)
        return [
            None if num_top is None else TokenLogprobs(token, chosen, list(zip(ids[:num_top], best[:num_top], strict=True)))
            for token, num_top, chosen, ids, best in rows
        ]


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids` [L] and of the `num_top` most probable tokens, for logits [L, V]."""
    return Logprobs(*ops.logprobs(logits, token_ids.clamp(min=0), min(num_top, logits.shape[1])))
