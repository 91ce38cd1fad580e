"""The format of gpt-oss: a message with the recipient functions.NAME is a call. Other text remains as it is."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.json_calls import JsonScanner
from stoker.server.protocols.common.parsers.harmony import HarmonyReader, Piece
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolCall, ToolParser

NAMESPACE = "functions."


class GptOssParser(ToolParser):
    """The body of the message is the arguments."""

    template_marks = ("<|channel|>commentary",)
    needs_special_tokens = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader = HarmonyReader()
        self._arguments = JsonScanner()
        self._has_arguments = False

    def flush(self) -> tuple[str, list[ToolCall]]:
        for piece in self._reader.flush():
            self._add(piece)
        return self._take_output()

    def _advance(self) -> bool:
        """Read all pieces of the held text. Never needs a second call."""
        held, self._held = self._held, ""
        for piece in self._reader.push(held):
            self._add(piece)
        return False

    def _add(self, piece: Piece) -> None:
        """Add a piece to the text, or to the call to which it belongs."""
        if not piece.recipient:
            self._text += piece.text
        elif piece.kind == "header":
            self.open_call(piece.recipient.removeprefix(NAMESPACE))
            self._arguments, self._has_arguments = JsonScanner(), False
        elif piece.kind == "body":
            text = piece.text if self._has_arguments else piece.text.lstrip()
            self._has_arguments = self._has_arguments or bool(text)
            if not (self._arguments.done or self._arguments.broken):
                self.add_arguments(self._arguments.push(text)[0])
        elif not self._has_arguments:
            self.add_arguments("{}")
