"""Reads the harmony format of gpt-oss: messages with a channel and an optional recipient, between special tokens.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": 1}<|call|>

The recipient may also precede the channel. The header of the first message lacks <|start|>assistant, which is the end of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from stoker.server.protocols.common.parsers.markers import first_marker, is_partial, partial_marker_start

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = "to="
MAX_HEADER_CHARS = 1024
MAX_SPACE = 16  # characters of white space before the first header
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class Piece(NamedTuple):
    """A part of the text: text outside messages, a header, a part of a message's body, an end marker, or an incomplete header."""

    kind: Literal["text", "header", "body", "end", "incomplete"]
    text: str
    channel: str = ""
    recipient: str = ""  # of the message; empty unless the message is a call


class HarmonyReader:
    """Splits text that arrives in chunks into pieces, which together are the text. A message may also end at the next header."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start = True  # no text has been returned
        self._inside = False  # a message
        self._channel = self._recipient = ""

    def push(self, text: str) -> Iterator[Piece]:
        """Add text. Returns the pieces that are certain."""
        self._held += text
        while self._held and (piece := self._body() if self._inside else self._outside()) is not None:
            yield piece

    def flush(self) -> Iterator[Piece]:
        """End the text. Returns what is left."""
        if held := self._take(len(self._held)):
            kind: Literal["text", "incomplete"] = "incomplete" if held.startswith((START, CHANNEL)) else "text"
            yield Piece("body", held, self._channel, self._recipient) if self._inside else Piece(kind, held)

    def _body(self) -> Piece | None:
        """The next part of the message's body, or its end."""
        found = first_marker(self._held, (*ENDS, START))
        if found is not None and found[0] == 0:
            self._inside = False
            size = 0 if found[1] == START else len(found[1])
            return Piece("end", self._take(size), self._channel, self._recipient)
        end = found[0] if found is not None else partial_marker_start(self._held, *ENDS, START)
        return Piece("body", self._take(end), self._channel, self._recipient) if end else None

    def _outside(self) -> Piece | None:
        """A header, or the text before it."""
        begin = self._header_start()
        if begin > 0:
            return Piece("text", self._take(begin))
        if self._at_start and is_partial(self._held.lstrip(), START, CHANNEL, RECIPIENT):
            return None
        end = self._held.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if end < 0:
            return Piece("text", self._take(MAX_HEADER_CHARS)) if len(self._held) >= MAX_HEADER_CHARS else None
        header = self._take(end + len(MESSAGE))
        self._inside = True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel is not None else ""
        self._recipient = recipient[1] if recipient is not None else ""
        return Piece("header", header, self._channel, self._recipient)

    def _header_start(self) -> int:
        """The index of the first header, or of the text that may be the start of one."""
        start = self._held.lstrip()
        if self._at_start and len(self._held) - len(start) <= MAX_SPACE and (start.startswith(RECIPIENT) or is_partial(start, RECIPIENT)):
            return 0
        found = first_marker(self._held, (START, CHANNEL))
        return found[0] if found is not None else partial_marker_start(self._held, START, CHANNEL)

    def _take(self, size: int) -> str:
        """Remove the first `size` characters of the held text and return them."""
        taken, self._held = self._held[:size], self._held[size:]
        self._at_start = self._at_start and not taken
        return taken
