"""The format of InternLM: <|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser


class InternLMParser(TaggedJsonParser):
    template_marks = ("<|action_start|>", "<|plugin|>")
    needs_special_tokens = True
    opens, closes = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)
