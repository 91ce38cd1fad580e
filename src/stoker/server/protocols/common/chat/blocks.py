"""The answer as a sequence of blocks: reasoning, text and tool calls. Responses and streams of several APIs consist of such blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from stoker.base.types import TokenLogprobs
from stoker.server.protocols.common.parsers.answer import AnswerParts

Kind = Literal["reasoning", "text", "call"]


class Block(msgspec.Struct):
    """One part of an answer. `text` is the text, the reasoning, or the arguments of the call as JSON text."""

    index: int  # number of the block in the answer, from 0
    kind: Kind
    text: str = ""
    name: str = ""  # of the function that is called
    call_id: str = ""
    ended: bool = False  # False while more text may follow, and if the answer was cut off


class BlockEvent(msgspec.Struct):
    """A change of a block: it starts, it grows by `text`, or it ends."""

    action: Literal["start", "grow", "end"]
    block: Block
    text: str = ""
    logprobs: list[TokenLogprobs] = []  # of the tokens of `text`, if the request has logprobs and the block is text


class AnswerBlocks:
    """Assembles the blocks of one answer from the parts that its parser returns."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def push(self, parts: AnswerParts) -> list[BlockEvent]:
        """Add new parts. A block ends when one of another kind, or another call, starts."""
        events: list[BlockEvent] = []
        for kind, text in (("reasoning", parts.reasoning), ("text", parts.content)):
            if text:
                if self._open_kind() != kind:
                    events += self._start(Block(len(self.blocks), "reasoning" if kind == "reasoning" else "text"))
                events += self._grow(text)
        for call in parts.calls:
            if call.id:
                events += self._start(Block(len(self.blocks), "call", name=call.name, call_id=call.id))
            events += self._grow(call.arguments)
        return events

    def end(self, *, cut_off: bool) -> list[BlockEvent]:
        """End the last block. An answer that was cut off leaves its `ended` False."""
        events = list(self._end())
        if events and cut_off:
            events[-1].block.ended = False
        return events

    def _open_kind(self) -> Kind | None:
        """The kind of the last block if it has not ended."""
        return self.blocks[-1].kind if self.blocks and not self.blocks[-1].ended else None

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        """End the last block and start this one."""
        yield from self._end()
        self.blocks.append(block)
        yield BlockEvent("start", block)

    def _grow(self, text: str) -> Iterator[BlockEvent]:
        """Append text to the last block."""
        if text:
            self.blocks[-1].text += text
            yield BlockEvent("grow", self.blocks[-1], text)

    def _end(self) -> Iterator[BlockEvent]:
        """End the last block if it has not ended."""
        if self._open_kind() is not None:
            self.blocks[-1].ended = True
            yield BlockEvent("end", self.blocks[-1])
