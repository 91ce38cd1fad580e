"""The format of Phi-4-mini: functools[{"name": …, "arguments": {…}}, …]."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class Phi4MiniParser(TaggedJsonParser):
    template_marks = ("functools[",)
    opens, closes = ("functools[",), ("]",)
    separators = ","
