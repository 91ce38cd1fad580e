"""The events of a response: its lifecycle, and the start, growth and end of each output item."""

from __future__ import annotations

from typing import Any

from stoker.server.errors import Failure
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.blocks import Block, BlockEvent
from stoker.server.protocols.openai.responses.objects import OutputItem, failed_object, finished_object, logprobs_object, response_object
from stoker.server.protocols.openai.responses.request import ResponseCall

Event = dict[str, Any]
_GROWTH = {"reasoning": "response.reasoning_text", "text": "response.output_text", "call": "response.function_call_arguments"}


class ResponseEvents:
    """Converts the events of an answer's blocks to those of the API, and assembles the response."""

    def __init__(self, call: ResponseCall, created: int) -> None:
        self._call = call
        self._items: list[OutputItem] = []
        self._num_events = 0
        self.response = response_object(call, "in_progress", created)

    def start(self) -> list[Event]:
        """The events response.created and response.in_progress."""
        return [self._event(f"response.{name}", response=self.response) for name in ("created", "in_progress")]

    def push(self, events: list[BlockEvent]) -> list[Event]:
        """The API's events for these events of blocks."""
        return [converted for event in events for converted in self._convert(event)]

    def finish(self, answer: Answer) -> list[Event]:
        """The last event, after which `response` is final. An answer without blocks is one empty message."""
        events = []
        if not answer.blocks:
            block = Block(0, "text", ended=True)
            events = self.push([BlockEvent("start", block), BlockEvent("end", block)])
        self.response = finished_object(self.response, answer, self._finished_items())
        ending = {"completed": "completed", "incomplete": "incomplete"}.get(self.response["status"], "failed")
        return [*events, self._event(f"response.{ending}", response=self.response)]

    def fail(self, failure: Failure) -> list[Event]:
        """The last event after an error."""
        self.response = failed_object({**self.response, "output": self._finished_items()}, failure)
        return [self._event("response.failed", response=self.response)]

    def _finished_items(self) -> list[dict[str, Any]]:
        """The output items as they are at the end."""
        return [item.finished() for item in self._items]

    def _convert(self, event: BlockEvent) -> list[Event]:
        """The API's events for one event of a block."""
        match event.action:
            case "start":
                return self._start_item(event.block)
            case "grow":
                return self._grow_item(event)
        return self._end_item()

    def _start_item(self, block: Block) -> list[Event]:
        """A new output item and its events. Text and reasoning also start a part."""
        item = OutputItem(block)
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=block.index, item=item.object("in_progress"))
        if block.kind == "call":
            return [added]
        return [added, self._part_event("response.content_part.added", item, part=item.part(""))]

    def _grow_item(self, event: BlockEvent) -> list[Event]:
        """The delta event of the current item."""
        item = self._items[-1]
        name = f"{_GROWTH[item.block.kind]}.delta"
        if item.block.kind == "call":
            return [self._item_event(name, item, delta=event.text)]
        if item.block.kind == "reasoning":
            return [self._part_event(name, item, delta=event.text)]
        logprobs = logprobs_object(self._call.turn.service, event.logprobs, self._call.num_top or 0)
        item.logprobs += logprobs
        return [self._part_event(name, item, delta=event.text, logprobs=logprobs)]

    def _end_item(self) -> list[Event]:
        """The events at the end of the current item, each with the whole text."""
        item = self._items[-1]
        text, name = item.block.text, f"{_GROWTH[item.block.kind]}.done"
        done = {"output_index": item.block.index, "item": item.finished()}
        if item.block.kind == "call":
            ended = [self._item_event(name, item, name=item.block.name, arguments=text)]
        else:
            logprobs = {"logprobs": item.logprobs} if item.block.kind == "text" else {}
            ended = [
                self._part_event(name, item, text=text, **logprobs),
                self._part_event("response.content_part.done", item, part=item.part(text)),
            ]
        return [*ended, self._event("response.output_item.done", **done)]

    def _part_event(self, kind: str, item: OutputItem, **members: Any) -> Event:
        """An event about the content part of an item. `kind` is its type."""
        return self._item_event(kind, item, content_index=0, **members)

    def _item_event(self, kind: str, item: OutputItem, **members: Any) -> Event:
        """An event about an item. `kind` is its type."""
        return self._event(kind, item_id=item.id, output_index=item.block.index, **members)

    def _event(self, kind: str, **members: Any) -> Event:
        """An event with the next sequence number."""
        event = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return event
