"""The formats of Granite: <|tool_call|>[{…}, …] (3.0), <tool_call>[{…}, …] (3.1 to 3.3), <tool_call>{…}</tool_call> (4.0)."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class GraniteParser(TaggedJsonParser):
    template_marks = ("<|tool_call|>",)
    needs_special_tokens = True
    opens, closes = ("<|tool_call|>", "<tool_call>"), ("</tool_call>",)
    separators = "[,]"
