"""Generates the answer to a chat turn, as events of its blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from stoker.base.types import Delta, FinishReason, TokenLogprobs, Usage
from stoker.frontend.prompts import encode_prompt
from stoker.server.errors import sequence_error
from stoker.server.protocols.common.chat.blocks import AnswerBlocks, Block, BlockEvent
from stoker.server.protocols.common.chat.turn import ChatTurn


class Answer:
    """The answer to a turn with one choice. Its fields grow while `stream` runs, and are final after it."""

    def __init__(self, turn: ChatTurn) -> None:
        self._turn = turn
        self._parser = turn.parser()
        self._assembled = AnswerBlocks()
        self._scores: list[TokenLogprobs] = []  # of tokens whose text the parser holds back
        self.token_ids: list[int] = []
        self.usage = Usage()
        self.num_reasoning_tokens = 0
        self.finish_reason = FinishReason.CANCELLED
        self.stop_reason: int | str | None = None

    @property
    def blocks(self) -> list[Block]:
        """The blocks so far."""
        return self._assembled.blocks

    async def stream(self) -> AsyncGenerator[list[BlockEvent], None]:
        """Generate. One list contains the events of all deltas that arrived together, and may be empty.

        Raises RequestError, QueueFullError or UnavailableError before the first list, and the error of a sequence that fails later.
        """
        async with aclosing(self._turn.service.stream(self._turn.request)) as batches:
            async for deltas in batches:
                yield [event for delta in deltas for event in self._push(delta)]
        await self._count_reasoning()

    async def run(self) -> None:
        """Generate the whole answer."""
        async with aclosing(self.stream()) as batches:
            async for _ in batches:
                pass

    def _push(self, delta: Delta) -> list[BlockEvent]:
        """Parse the text of a delta and return the events of blocks. Raises an error if the sequence failed."""
        self._count(delta)
        if delta.finish_reason is FinishReason.ERROR:
            raise sequence_error(delta.error, ready=self._turn.service.ready)
        self.token_ids += delta.token_ids
        self._scores += delta.logprobs
        parts = self._parser.push(delta.text, last=delta.finish_reason is not None)
        events = self._assembled.push(parts)
        if parts:
            self._attach_scores(events)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            events += self._assembled.end(cut_off=delta.finish_reason is not FinishReason.STOP)
        return events

    def _count(self, delta: Delta) -> None:
        """Add a delta to the usage. The first delta has the counts of the prompt, the last one all counts."""
        self.usage.completion_tokens += len(delta.token_ids)
        if (reported := delta.usage) is not None:
            self.usage.prompt_tokens, self.usage.cached_tokens = reported.prompt_tokens, reported.cached_tokens
            self.usage.completion_tokens = reported.completion_tokens or self.usage.completion_tokens

    async def _count_reasoning(self) -> None:
        """Count the tokens of the reasoning's text. Its markers are not part of it."""
        if text := "".join(block.text for block in self.blocks if block.kind == "reasoning"):
            ids = await encode_prompt(self._turn.service, text, add_special_tokens=False)
            self.num_reasoning_tokens = min(len(ids), self.usage.completion_tokens)

    def _attach_scores(self, events: list[BlockEvent]) -> None:
        """Give the collected log-probabilities to the first event by which text grows."""
        for event in events:
            if event.action == "grow" and event.block.kind == "text":
                event.logprobs = self._scores
                break
        self._scores = []
