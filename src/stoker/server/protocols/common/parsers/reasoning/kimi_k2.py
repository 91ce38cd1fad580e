"""Reasoning of Kimi K2 Thinking: <think>…</think>, and tool calls may start before </think>."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.reasoning.think import ThinkParser


class KimiK2Reasoning(ThinkParser):
    template_marks = ("<|tool_calls_section_begin|>", "<think>")
    needs_special_tokens = True
    interrupts = ("<|tool_calls_section_begin|>",)
