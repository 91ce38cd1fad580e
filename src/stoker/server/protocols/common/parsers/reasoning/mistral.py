"""Reasoning of Magistral: [THINK]…[/THINK]."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.reasoning.parser import MarkedReasoningParser


class MistralReasoning(MarkedReasoningParser):
    template_marks = ("[THINK]",)
    needs_special_tokens = True
    opens, closes = ("[THINK]",), ("[/THINK]",)
    start_marker, end_marker = "[THINK]", "[/THINK]"
