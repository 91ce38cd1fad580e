"""Measures when a request was queued, when its first token arrived and when it ended."""

from __future__ import annotations

import time

from stoker.base.types import AdmissionRecord, Timings


class Stopwatch:
    """The clock of one request, which starts when the object is created."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._prepare_s = self._queue_s = 0.0
        self.detokenize_s = 0.0
        self._first: float | None = None

    def prepared(self) -> None:
        """Record that the prompt is tokenized."""
        self._prepare_s = time.monotonic() - self.started

    def token(self, admission: AdmissionRecord | None) -> None:
        """Record that tokens arrived. Only the first call counts; `admission` is that of the first sequence."""
        if self._first is None:
            self._first = time.monotonic()
            self._queue_s = admission.queue_s if admission is not None else 0.0

    def forget_token(self) -> None:
        """The request runs again: the next call of `token` counts."""
        self._first = None

    def timings(self, lengths: list[int]) -> Timings:
        """The timings of a request that ends now. `lengths` are the numbers of generated tokens of its sequences."""
        total_s = time.monotonic() - self.started
        first_s = total_s if self._first is None else self._first - self.started
        gaps = max(lengths, default=0) - 1
        return Timings(
            queue_s=self._queue_s,
            time_to_first_token_s=first_s,
            total_s=total_s,
            tokens_per_s=sum(lengths) / total_s if total_s > 0 else 0.0,
            time_per_output_token_s=(total_s - first_s) / gaps if gaps > 0 else 0.0,
            prepare_s=self._prepare_s,
            detokenize_s=self.detokenize_s,
        )
