"""The format of MiniMax M1: <tool_calls>, one object {"name": …, "arguments": {…}} per line, </tool_calls>."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class MiniMaxM1Parser(TaggedJsonParser):
    template_marks = ("<tool_calls>",)
    opens, closes = ("<tool_calls>",), ("</tool_calls>",)
