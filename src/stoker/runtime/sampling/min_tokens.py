"""A minimum length: until it is reached, no id that would end the sequence can be chosen."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Ban


class MinTokens(Ban):
    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def banned(self, seq: Sequence) -> Iterable[int]:
        # The token being chosen is already counted as pending.
        return seq.end_ids if seq.num_generated - 1 < seq.min_tokens else ()
