"""The format of DeepSeek V3 and R1: function<｜tool▁sep｜>NAME, then the arguments as a Markdown block of JSON."""

from __future__ import annotations

import re
from typing import ClassVar

from stoker.server.protocols.common.parsers.calls.headed_calls import HeadedCallsParser


class DeepSeekV3Parser(HeadedCallsParser):
    template_marks: ClassVar[tuple[str, ...]] = ("<｜tool▁sep｜>", "```json")
    open, close = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_open, call_close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    header = re.compile(r"\s*\w+<｜tool▁sep｜>(?P<name>[^\s<{]+)\s*(?:```json)?\s*(?=\{)")
