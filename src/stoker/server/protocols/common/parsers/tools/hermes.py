"""The format of Hermes and Qwen: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>, with text around them."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class HermesParser(TaggedJsonParser):
    """One call between each pair of markers."""

    template_marks = ("<tool_call>",)
    opens, closes = ("<tool_call>",), ("</tool_call>",)
