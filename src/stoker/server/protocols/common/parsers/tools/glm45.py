"""The format of GLM-4.5: <tool_call>NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> per argument, </tool_call>."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.calls.parameters import ParametersParser


class Glm45Parser(ParametersParser):
    template_marks = ("<tool_call>", "<arg_key>")
    open = "<tool_call>"
    close = call_close = "</tool_call>"
    call_open = ""
    call_header = re.compile(r"(?P<name>[^\s<>{}\"]+)\s*(?=<)")
    parameter_open = "<arg_key>"
    parameter_header = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>")
    value_close = "</arg_value>"
