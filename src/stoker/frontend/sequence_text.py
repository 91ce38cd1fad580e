"""Converts the outputs of one sequence to deltas: converts tokens to text, and ends the text at stop strings."""

from __future__ import annotations

from stoker.base.types import Delta, FinishReason, SamplingParams
from stoker.frontend.detokenizer import Detokenizer
from stoker.frontend.stop_strings import StopChecker
from stoker.runtime.request import SequenceOutput


class SequenceText:
    """The text of one sequence, to which its outputs are pushed in order. Their grouping does not change the joined deltas.

    Tokens before min_tokens cannot complete a stop string. The text of the end or stop id is omitted unless include_stop is set.
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
        """Whether a stop string ended the sequence. The executor does not see text, so the caller must cancel the sequence there."""
        return self._stop is not None and self._stop.matched is not None

    def push(self, output: SequenceOutput) -> Delta:
        """The delta for one output. Must not be called again after a delta with a finish reason."""
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
        """(text of these tokens, number of tokens that were consumed until a stop string matched)."""
        if self._stop is None:
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for used, token in enumerate(ids, 1):
            text += self._stop.push(self._detokenizer.push((token,)), can_match=self.num_tokens + used > self._params.min_tokens)
            if self._stop.matched is not None:
                return text, used
        return text, len(ids)

    def _end(self) -> str:
        """The text that was held back, at the end of the sequence."""
        held = self._detokenizer.flush()
        if self._stop is None:
            return held
        return self._stop.push(held, can_match=self.num_tokens > self._params.min_tokens) + self._stop.flush()
