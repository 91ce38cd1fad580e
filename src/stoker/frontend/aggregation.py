"""Combines the deltas of a stream into one completion."""

from __future__ import annotations

from stoker.base.types import Delta, FinishReason, Timings, TokenLogprobs, Usage
from stoker.frontend.service import Choice, Completion
from stoker.runtime.request import TokenRequest


class Aggregator:
    """Collects the deltas of one request, in order."""

    def __init__(self, task: TokenRequest) -> None:
        self._task = task
        self._choices = [Choice(i, "", [], FinishReason.CANCELLED) for i in range(task.params.n)]
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._usage = Usage(prompt_tokens=len(task.prompt_ids))
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._timings: Timings | None = None

    def add(self, deltas: list[Delta]) -> None:
        """Append the next deltas of the stream."""
        for delta in deltas:
            choice = self._choices[delta.index]
            self._texts[delta.index].append(delta.text)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
            choice.admission = choice.admission or delta.admission
            if delta.draft_tokens:
                choice.draft_tokens, choice.accepted_draft_tokens = delta.draft_tokens, delta.accepted_draft_tokens
            if delta.prefill_chunks:
                choice.prefill_chunks = delta.prefill_chunks
            self._usage = delta.usage or self._usage
            self._timings = delta.timings
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs

    def completion(self) -> Completion:
        """The completion that consists of all deltas so far."""
        for choice, texts in zip(self._choices, self._texts, strict=True):
            choice.text = "".join(texts)
        return Completion(self._task.request_id, self._task.prompt_ids, self._choices, self._usage, self._prompt_logprobs, self._timings)
