"""The format of Phi-4-mini: functools[{"name": …, "arguments": {…}}, …]."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class Phi4MiniParser(TaggedJsonParser):
    opens, closes = ("functools[",), ("]",)
    separators = ","
