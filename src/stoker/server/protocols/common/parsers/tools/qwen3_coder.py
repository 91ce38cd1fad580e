"""The format of Qwen3-Coder: <tool_call><function=NAME>, one <parameter=KEY> VALUE </parameter> per argument, </function></tool_call>."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.calls.parameters import ParametersParser


class Qwen3CoderParser(ParametersParser):
    template_marks = ("<tool_call>", "<function=")
    open, close = "<tool_call>", "</tool_call>"
    call_open, call_close = "<function=", "</function>"
    call_header = re.compile(r"<function=(?P<name>[^>]+)>")
    parameter_open = "<parameter="
    parameter_header = re.compile(r"<parameter=(?P<key>[^>]+)>")
    value_close = "</parameter>"
    newlines = True
