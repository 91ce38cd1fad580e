"""Stop words with several tokens, searched in the token ids of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from stoker.base.types import Delta, FinishReason, GenerationRequest, Usage
from stoker.frontend.service import Choice, Completion, Service
from stoker.frontend.stopwatch import Stopwatch


class StopIdChecker:
    """Searches stop words in the token ids of one sequence."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._max_length = max(map(len, words))
        self._last_ids: tuple[int, ...] = ()

    def push(self, ids: Sequence[int]) -> tuple[int, bool]:
        """Add token ids. Returns (number of them up to the end of the first stop word, whether a stop word was found)."""
        for used, token in enumerate(ids, 1):
            self._last_ids = (*self._last_ids, token)[-self._max_length :]
            if any(self._last_ids[-len(word) :] == word for word in self._words):
                return used, True
        return len(ids), False


async def stream(service: Service, request: GenerationRequest, words: Sequence[tuple[int, ...]]) -> AsyncGenerator[list[Delta], None]:
    """`service.stream` with each sequence ended after its first stop word. Closing the generator cancels the request."""
    checkers = [StopIdChecker(words) for _ in range(request.params.n)]
    live = set(range(request.params.n))
    async with aclosing(service.stream(request)) as batches:
        async for deltas in batches:
            live_deltas = []
            for delta in deltas:
                if delta.index in live:
                    live_deltas.append(_truncate(delta, checkers[delta.index]))
                    if delta.finish_reason is not None:
                        live.discard(delta.index)
            if live_deltas:
                yield live_deltas
            if not live:
                return


def _truncate(delta: Delta, checker: StopIdChecker) -> Delta:
    """The delta without the tokens after the stop word. Its text is unchanged, because callers use the token ids."""
    used, stopped = checker.push(delta.token_ids)
    if stopped:
        delta.token_ids, delta.logprobs, delta.finish_reason = delta.token_ids[:used], delta.logprobs[:used], FinishReason.STOP
    return delta


async def complete(service: Service, request: GenerationRequest, words: Sequence[tuple[int, ...]]) -> Completion:
    """`service.complete`, with each sequence ended after its first stop word."""
    choices = [Choice(i, "", [], FinishReason.CANCELLED) for i in range(request.params.n)]
    usage, stopwatch = Usage(), Stopwatch()
    async with aclosing(stream(service, request, words)) as batches:
        async for deltas in batches:
            for delta in deltas:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.token_ids = [*choice.token_ids, *delta.token_ids]
                choice.logprobs = [*choice.logprobs, *delta.logprobs]
                choice.admission = choice.admission or delta.admission
                if delta.draft_tokens:
                    choice.draft_tokens, choice.accepted_draft_tokens = delta.draft_tokens, delta.accepted_draft_tokens
                if delta.token_ids:
                    stopwatch.token(delta.admission)
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
                usage = delta.usage or usage
    assert isinstance(request.prompt, list)  # only requests with token ids have such stop words
    timings = stopwatch.timings([len(choice.token_ids) for choice in choices])
    return Completion(request.request_id, request.prompt, choices, usage, timings=timings)
