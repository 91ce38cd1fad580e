"""The format of Kimi K2: functions.NAME:INDEX, <|tool_call_argument_begin|>, {…}."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.calls.headed_calls import HeadedCallsParser


class KimiK2Parser(HeadedCallsParser):
    """The id of a call is functions.NAME:INDEX, because the chat template writes ids back and the model expects this form."""

    template_marks = ("<|tool_calls_section_begin|>",)
    open, close = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_open, call_close = "<|tool_call_begin|>", "<|tool_call_end|>"
    header = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{:]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)")
