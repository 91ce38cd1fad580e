"""One sequence's outputs to deltas: detokenized, cut at stop strings, finished once."""

from __future__ import annotations

from stoker.base.types import Delta, FinishReason, SamplingParams
from stoker.frontend.detokenizer import Detokenizer
from stoker.frontend.stop_strings import StopChecker
from stoker.runtime.request import SequenceOutput


class SequenceText:
    """Feed a sequence's outputs in order. However they are grouped, the joined deltas are the same.

    Tokens before min_tokens cannot complete a stop string. The text of the end or stop id is left out, unless include_stop.
    """

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self._params = params
        self._detokenizer = detokenizer
        self._stop = StopChecker(params.stop, include_stop=params.include_stop) if params.stop else None

    @property
    def stopped_by_text(self) -> bool:
        """A stop string ended it, which the executor does not know."""
        return self._stop is not None and self._stop.matched is not None

    def push(self, output: SequenceOutput) -> Delta:
        """New text and ids. The delta that finishes the sequence is the last; don't push after it."""
        ids = output.token_ids
        silent_end = output.stop_id is not None and not self._params.include_stop
        text, used = self._advance(ids[:-1] if silent_end else ids)
        if not self.stopped_by_text:
            used = len(ids)
        self.num_tokens += used
        if output.finish_reason is not None and not self.stopped_by_text:
            text += self._end()
        self.finished = output.finish_reason is not None or self.stopped_by_text
        delta = Delta(self.index, text, ids[:used], output.logprobs[:used], output.finish_reason, output.stop_id)
        if self.stopped_by_text:
            assert self._stop is not None
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._stop.matched
        if output.error is not None:
            delta.error = output.error.message
        return delta

    def _advance(self, ids: list[int]) -> tuple[str, int]:
        """Text of these tokens, and how many of them were taken until a stop string matched."""
        if self._stop is None:
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for used, token in enumerate(ids, 1):
            text += self._stop.push(self._detokenizer.push((token,)), armed=self.num_tokens + used > self._params.min_tokens)
            if self._stop.matched is not None:
                return text, used
        return text, len(ids)

    def _end(self) -> str:
        held = self._detokenizer.flush()
        if self._stop is None:
            return held
        return self._stop.push(held, armed=self.num_tokens > self._params.min_tokens) + self._stop.flush()
