"""The format of Jamba: <tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class JambaParser(TaggedJsonParser):
    template_marks = ("<tool_calls>", "<|bom|>")
    opens, closes = ("<tool_calls>",), ("</tool_calls>",)
    separators = "[,]"
