"""Reasoning between <think> and </think>, the format of Qwen, DeepSeek, GLM, MiniMax and Intern-S1."""

from __future__ import annotations

from typing import ClassVar

from stoker.server.protocols.common.parsers.reasoning.parser import MarkedReasoningParser


class ThinkParser(MarkedReasoningParser):
    """For models that reason or answer immediately. The prompt may end with <think>."""

    template_marks: ClassVar[tuple[str, ...]] = ("</think>",)
    opens, closes = ("<think>",), ("</think>",)
    start_marker, end_marker = "<think>", "</think>"


class DeepSeekR1Parser(ThinkParser):
    """For models whose answers start with reasoning, also if neither the prompt nor the answer contains <think>."""

    template_marks = ()  # its templates contain <think>, so that ThinkParser parses the answers, too

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """True: the answer starts inside the reasoning, whatever the end of the prompt."""
        return True
