"""Minimum length: bans end ids and stop ids until a sequence has min_tokens generated tokens."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.types import SamplingParams
from stoker.runtime.sampling.feature import Ban, SampledRow


class MinTokens(Ban):
    """Bans the ids that would end the sequence too early."""

    reads_tokens = True

    def applies_to(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def banned(self, row: SampledRow) -> Iterable[int]:
        """The ids that end the sequence, while it has fewer than min_tokens tokens."""
        return row.seq.end_ids if row.num_generated < row.seq.min_tokens else ()
