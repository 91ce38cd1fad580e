"""The format of MiniMax M2: <minimax:tool_call>, <invoke name="NAME">, one <parameter name="KEY">VALUE</parameter> per argument."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.calls.parameters import ParametersParser


class MiniMaxM2Parser(ParametersParser):
    template_marks = ("<minimax:tool_call>",)
    needs_special_tokens = True
    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    call_open, call_close = '<invoke name="', "</invoke>"
    call_header = re.compile(r'<invoke name="(?P<name>[^">]+)">')
    parameter_open = '<parameter name="'
    parameter_header = re.compile(r'<parameter name="(?P<key>[^">]+)">')
    value_close = "</parameter>"
