"""Stop words of several tokens, found in the ids as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from stoker.base.types import Delta, FinishReason, GenerationRequest, Usage
from stoker.frontend.service import Choice, Completion, Service


class StopIds:
    """One sequence: `cut` tells how many of the new ids belong to it, and whether a stop word ended it with the last of these."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._reach = max(map(len, words))
        self._last_ids: tuple[int, ...] = ()

    def cut(self, ids: Sequence[int]) -> tuple[int, bool]:
        for used, token in enumerate(ids, 1):
            self._last_ids = (*self._last_ids, token)[-self._reach :]
            if any(self._last_ids[-len(word) :] == word for word in self._words):
                return used, True
        return len(ids), False


async def stream(service: Service, request: GenerationRequest, words: Sequence[tuple[int, ...]]) -> AsyncGenerator[list[Delta], None]:
    """`service.stream`, each sequence ended behind its first stop word. Leaving cancels what still runs."""
    checkers = [StopIds(words) for _ in range(request.params.n)]
    live = set(range(request.params.n))
    async with aclosing(service.stream(request)) as batches:
        async for deltas in batches:
            live_deltas = []
            for delta in deltas:
                if delta.index in live:
                    live_deltas.append(_cut(delta, checkers[delta.index]))
                    if delta.finish_reason is not None:
                        live.discard(delta.index)
            if live_deltas:
                yield live_deltas
            if not live:
                return


def _cut(delta: Delta, checker: StopIds) -> Delta:
    """Ids and log-probabilities end with the stop word; the text is left as it is, for callers here read ids."""
    used, stopped = checker.cut(delta.token_ids)
    if stopped:
        delta.token_ids, delta.logprobs, delta.finish_reason = delta.token_ids[:used], delta.logprobs[:used], FinishReason.STOP
    return delta


async def complete(service: Service, request: GenerationRequest, words: Sequence[tuple[int, ...]]) -> Completion:
    """The joined stream."""
    choices = [Choice(i, "", [], FinishReason.CANCELLED) for i in range(request.params.n)]
    usage = Usage()
    async with aclosing(stream(service, request, words)) as batches:
        async for deltas in batches:
            for delta in deltas:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.token_ids = [*choice.token_ids, *delta.token_ids]
                choice.logprobs = [*choice.logprobs, *delta.logprobs]
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
                usage = delta.usage or usage
    assert isinstance(request.prompt, list)  # only requests of token ids have such words
    return Completion(request.request_id, request.prompt, choices, usage)
