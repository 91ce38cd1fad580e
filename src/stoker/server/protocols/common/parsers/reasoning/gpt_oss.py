"""Reasoning of gpt-oss: messages of the channel `analysis`."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.harmony import HarmonyReader, Piece
from stoker.server.protocols.common.parsers.reasoning.parser import ReasoningParser


class GptOssReasoning(ReasoningParser):
    """The bodies of analysis messages are reasoning; the bodies of other messages are content. Messages are separated by newlines.

    Calls remain as they are, for the tool parser.
    """

    template_marks = ("<|channel|>analysis",)
    needs_special_tokens = True
    end_marker, max_end_tokens = "<|channel|>final<|message|>", 3
    precedes_calls = False

    def __init__(self, opened: bool) -> None:
        super().__init__(opened)
        self._reader = HarmonyReader()
        self._num_reasoning = 0
        self._num_content = 0

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns (reasoning, content) of the pieces that are certain."""
        return self._joined(list(self._reader.push(text)))

    def flush(self) -> tuple[str, str]:
        return self._joined(list(self._reader.flush()))

    def _joined(self, pieces: list[Piece]) -> tuple[str, str]:
        """The reasoning and the content of the pieces, each joined."""
        parts = [self._split(piece) for piece in pieces]
        return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)

    def _split(self, piece: Piece) -> tuple[str, str]:
        """(reasoning, content) of one piece."""
        if piece.kind == "text" or piece.recipient:
            return "", piece.text
        if piece.kind == "header":
            return self._separators(piece.channel == "analysis")
        if piece.kind == "body":
            return (piece.text, "") if piece.channel == "analysis" else ("", piece.text)
        return "", ""

    def _separators(self, is_reasoning: bool) -> tuple[str, str]:
        """The newline between this message and the previous one of its kind."""
        if is_reasoning:
            self._num_reasoning += 1
            return "\n" if self._num_reasoning > 1 else "", ""
        self._num_content += 1
        return "", "\n" if self._num_content > 1 else ""
