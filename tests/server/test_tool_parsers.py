"""Parsers of the tool calls and the reasoning of model families, for texts that the families' own chat templates produce."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.server.protocols.common.parsers.answer import AnswerParser, AnswerParts, joined_calls
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.selection import parsers_of_template
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "tags": {"$ref": "#/$defs/tags"},
        },
        "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
    },
    "time": {"type": "object", "properties": {}},
}
WEATHER = {"city": 'Zürich "HB"\nnow <b>', "days": 3, "hourly": True, "tags": ["a", "b"]}
JSON = json.dumps(WEATHER, ensure_ascii=False)
CALLS = [("weather", WEATHER), ("time", {})]

# The assistant's turn that the chat template of each family renders for CALLS after the text "Let me look.", without the end token.
# DeepSeek: vLLM's tool_chat_template_deepseekv3.jinja and the template of DeepSeek-V3.1; gpt-oss: openai/gpt-oss-120b; GLM: GLM-4.6;
# Kimi: Kimi-K2-Thinking; Llama 4, InternLM, xLAM and MiniMax M1: vLLM's tool_chat_template_*.jinja; MiniMax M2, Qwen3-Coder: the models.
# Jamba: the outputs in vLLM's tests of its parser. Granite and Phi-4-mini: the format that the system message of the template requires.
TURNS = {
    "deepseek_v3": "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + JSON
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "glm45": 'Let me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "HB"\nnow <b></arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>hourly</arg_key>\n<arg_value>true</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>',
    "qwen3_coder": 'Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich "HB"\nnow <b>\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
    '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>',
    "minimax_m1": f'Let me look.\n<tool_calls>\n{{"name": "weather", "arguments": {JSON}}}\n'
    '{"name": "time", "arguments": {}}\n</tool_calls>',
    "minimax_m2": 'Let me look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich "HB"\nnow <b></parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="hourly">true</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n'
    '</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    "internlm": f'Let me look.<|action_start|><|plugin|>\n{{"name": "weather", "arguments": {JSON}}}<|action_end|>'
    '<|action_start|><|plugin|>\n{"name": "time", "arguments": {}}<|action_end|>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]',
    "xlam": f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]',
    "jamba": f'Let me look. <tool_calls>[\n    {{"name": "weather", "arguments": {JSON}}},\n    {{"name": "time", "arguments": {{}}}}\n]'
    "</tool_calls>",
    "phi4_mini": f'functools[{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]',
    "hermes": f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "mistral": f'Let me look.[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]',
    "llama3": f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "time", "parameters": {{}}}}',
    "llama4_pythonic": '[weather(city="Zürich \\"HB\\"\\nnow <b>", days=3, hourly=True, tags=["a", "b"]), time()]',
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
    "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
}
TURNS["qwen"] = TURNS["hermes"]
# The other forms of the families' output.
FORMS = {
    "granite": ["<tool_call>" + TURNS["granite"].removeprefix("<|tool_call|>"), TURNS["hermes"].replace("Let me look.\n", "")],
    "xlam": [
        f"Let me look.\n```json\n{TURNS['xlam']}\n```",
        f"Let me look.[TOOL_CALLS]{TURNS['xlam']}",
        f"Let me look.<tool_call>{TURNS['xlam']}</tool_call>",
    ],
    "llama4_pythonic": [f"<|python_start|>{TURNS['llama4_pythonic']}<|python_end|>"],
    "internlm": [TURNS["internlm"].replace("arguments", "parameters")],
    "glm45": [TURNS["glm45"].replace("</arg_key>\n", "</arg_key>").replace("weather\n", "weather").replace("time\n", "time")],  # GLM-4.7
    "gpt_oss": [" to=functions.weather<|channel|>commentary json<|message|>" + TURNS["gpt_oss"].split("<|message|>", 1)[1]],
    "mistral": [f"Let me look.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]time[ARGS]{{}}"],
}


def parse(parser: str, chunks: list[str], reasoning: str | None = None, *, opened: bool = False) -> AnswerParts:
    """The joined parts of an answer that arrives in these chunks."""
    thoughts = REASONING_PARSERS.get(reasoning)(opened) if reasoning is not None else None
    tools = TOOL_PARSERS.get(parser)(SCHEMAS) if parser else None
    answer = AnswerParser(thoughts, tools, one_call=False)
    parts = [answer.push(chunk, last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    calls = joined_calls([call for part in parts for call in part.calls])
    assert [call.index for call in calls] == list(range(len(calls))) and len({call.id for call in calls}) == len(calls)
    return AnswerParts("".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls)


def without_ids(parts: AnswerParts) -> tuple[str, str, list[tuple[str, str]]]:
    return parts.content, parts.reasoning, [(call.name, call.arguments) for call in parts.calls]


def test_every_parser_has_a_turn() -> None:
    assert set(TURNS) == set(TOOL_PARSERS)


@pytest.mark.parametrize(("parser", "turn"), [*TURNS.items(), *((name, form) for name, forms in FORMS.items() for form in forms)])
def test_the_turn_of_a_template_is_parsed_to_its_calls(parser: str, turn: str) -> None:
    parts = parse(parser, [turn])
    assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == CALLS
    assert parts.content == ("Let me look." if turn.startswith("Let") else "")
    assert without_ids(parse(parser, list(turn))) == without_ids(parts)


@pytest.mark.parametrize("parser", TURNS)
def test_strings_are_emitted_while_they_arrive(parser: str) -> None:
    tools = TOOL_PARSERS.get(parser)(SCHEMAS)
    turn = TURNS[parser]
    start, end = turn.index("now <b>"), turn.index("days")
    tools.push(turn[:start])
    seen = "".join(call.arguments for char in turn[start:end] for call in tools.push(char)[1])
    assert "now <b>" in seen


@pytest.mark.parametrize("parser", TURNS)
def test_a_complete_call_survives_truncation(parser: str) -> None:
    turn = TURNS[parser]
    (call,) = parse(parser, [turn[: turn.rindex("time")]]).calls
    assert (call.name, json.loads(call.arguments)) == CALLS[0]
    (call,) = parse(parser, [turn[: turn.index("now <b>") + 3]]).calls
    assert call.name == "weather" and call.arguments == JSON[: len('{"city": "Zürich \\"HB\\"\\nnow')]


@pytest.mark.parametrize("parser", TURNS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Just text.\n\n  Code:\n```json\n[1, 2]\n```\n",
        '{"answer": [42]}',
        "[weather] is a link (city=1) <b>tool</b>",
        "<tool_call",
        "a < b | c",
    ],
)
def test_text_without_calls_is_content(parser: str, text: str) -> None:
    assert without_ids(parse(parser, [text])) == without_ids(parse(parser, [*text, ""])) == (text, "", [])


def chunked(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def damaged(data: st.DataObject, text: str) -> str:
    """The text, truncated, with a part removed or repeated, or with a character inserted."""
    i, j = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    inserted = data.draw(st.sampled_from(["", "<", ">", "[", "]", "{", "}", '"', "\n", ",", "=", " ", "x", "\\", "(", text[i:j]]))
    return data.draw(st.sampled_from([text, text[:i], text[:i] + text[j:], text[i:j], text[:i] + inserted + text[i:], text + text]))


@pytest.mark.parametrize("parser", sorted(set(TURNS) - {"qwen"}))
@settings(max_examples=60)
@given(data=st.data())
def test_the_result_does_not_depend_on_the_chunks(parser: str, data: st.DataObject) -> None:
    text = damaged(data, data.draw(st.sampled_from([TURNS[parser], *FORMS.get(parser, [])])))
    assert without_ids(parse(parser, chunked(data, text))) == without_ids(parse(parser, [text]))


ONE_PARAMETER = {
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize("parser", ONE_PARAMETER)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "  two\n lines\n", "  two\n lines\n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"x": "a\nb"}', {"x": "a\nb"}),
        ({"$ref": "#/$defs/missing"}, "[1]", [1]),
        ({}, "True", True),
        ({}, "plain", "plain"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_the_schema_decides_the_type_of_a_value(parser: str, schema: dict[str, Any], text: str, value: Any) -> None:
    tools = TOOL_PARSERS.get(parser)({"f": {"type": "object", "properties": {"a": schema}}})
    _, calls = tools.push(ONE_PARAMETER[parser].replace("{}", text))
    assert json.loads("".join(call.arguments for call in calls)) == {"a": value}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("a='it''s', )", None),
        ("a='it\\'s', b=\"\\u00e9\\x41\\t\\q\", )", {"a": "it's", "b": "éA\t\\q"}),
        ("a=-1.5e3, b=1_000, c=nan, d=None, e=word)", {"a": -1500.0, "b": 1000, "c": "nan", "d": None, "e": "word"}),
        ("a={'k': (1, [True, ], {}), 2: 'x'}, b=[])", {"a": {"k": [1, [True], {}], "2": "x"}, "b": []}),
        (")", {}),
        ("5)", None),
        ("a=f(1))", None),
        ("a=[1}", None),
    ],
)
def test_python_arguments(text: str, arguments: dict[str, Any] | None) -> None:
    """None: the text is no call of this form, so that the arguments remain incomplete, and nothing fails."""
    (call,) = parse("llama4_pythonic", [*f"[weather({text}]"]).calls
    if arguments is not None:
        assert json.loads(call.arguments) == arguments


def test_ids_of_kimi_are_those_that_its_template_expects() -> None:
    assert [call.id for call in parse("kimi_k2", [TURNS["kimi_k2"]]).calls] == ["functions.weather:0", "functions.time:1"]


# Reasoning: (parser, whether the prompt opened it, text, reasoning, content)
ANSWERS = [
    *(
        (name, False, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes.")
        for name in ("qwen3", "deepseek_v31", "glm45", "minimax_m1", "intern_s1")
    ),
    *((name, True, "hm\n</think>\n\nYes.", "hm", "Yes.") for name in ("qwen3", "deepseek_v31", "deepseek_r1", "minimax_m2", "kimi_k2")),
    ("kimi_k2", False, "<think>hm</think>Yes.", "hm", "Yes."),
    ("mistral", False, "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    (
        "granite",
        False,
        "Here is my thought process:This\nThat Here is my response: This is the rest\nThat",
        "This\nThat",
        "This is the rest\nThat",
    ),
    ("granite", False, "Here's my thought process: hm Here's my response: Yes.", "hm", "Yes."),
    ("granite", False, "<think>hm</think>\n<response>Yes.\n</response>", "hm", "Yes."),
    ("granite", False, "Here is my thought", "", "Here is my thought"),
    ("granite", False, "<response>Yes.</response>", "", "<response>Yes.</response>"),
    ("gpt_oss", False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "hm", "Yes."),
    ("gpt_oss", False, "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
    ("gpt_oss", False, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", "a\nb", ""),
    ("gpt_oss", False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|chan", "hm", ""),
    ("gpt_oss", False, "No channel, to=me.", "", "No channel, to=me."),
]


@pytest.mark.parametrize(("parser", "opened", "text", "reasoning", "content"), ANSWERS)
def test_reasoning_is_separated_in_the_format_of_the_family(parser: str, opened: bool, text: str, reasoning: str, content: str) -> None:
    assert without_ids(parse("", [text], parser, opened=opened)) == (content, reasoning, [])


def test_every_reasoning_parser_has_an_answer() -> None:
    assert {parser for parser, *_ in ANSWERS} == set(REASONING_PARSERS)


@pytest.mark.parametrize("parser", sorted(REASONING_PARSERS))
@settings(max_examples=60)
@given(data=st.data())
def test_reasoning_does_not_depend_on_the_chunks(parser: str, data: st.DataObject) -> None:
    text = damaged(data, data.draw(st.sampled_from([text for name, _, text, *_ in ANSWERS if name == parser])))
    opened = data.draw(st.booleans())
    assert without_ids(parse("", chunked(data, text), parser, opened=opened)) == without_ids(parse("", [text], parser, opened=opened))


@pytest.mark.parametrize(
    ("tools", "reasoning", "before"),
    [
        ("glm45", "glm45", lambda turn: f"<think>hm</think>\n{turn}"),
        ("kimi_k2", "kimi_k2", lambda turn: f"<think>hm{turn.removeprefix('Let me look.')}"),  # without </think>
        ("minimax_m2", "minimax_m2", lambda turn: f"<think>\nhm\n</think>\n\n{turn}"),
        ("deepseek_v3", "deepseek_r1", lambda turn: f"hm</think>{turn}"),
        ("gpt_oss", "gpt_oss", lambda turn: f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{turn}"),
    ],
)
def test_reasoning_and_calls(tools: str, reasoning: str, before: Callable[[str], str]) -> None:
    turn = before(TURNS[tools])
    parts = parse(tools, list(turn), reasoning, opened=reasoning == "deepseek_r1")
    assert parts.reasoning == "hm" and parts.content in ("", "Let me look.")
    assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == CALLS


def test_harmony_preambles_are_content() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"zone": "CET"}'
    )
    assert without_ids(parse("gpt_oss", [*text], "gpt_oss")) == ("Let me look.", "hm", [("time", '{"zone": "CET"}')])


# Parts of the families' chat templates: of the tools' description, and of the assistant's turn.
TEMPLATES = [
    ("{{'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n'}}", "deepseek_v3", None),
    ("{{'<｜tool▁sep｜>' + tool['function']['arguments']}} {%- if '</think>' in content -%}", "deepseek_v31", "qwen3"),
    ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> {{ '\\n<think></think>' }}", "glm45", "qwen3"),
    ("{{- '<tool_call>\\n{\"name\": \"' }} {%- set content = content.split('</think>')[-1] %}", "hermes", "qwen3"),
    ("{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", "qwen3_coder", None),
    ("{{- '<minimax:tool_call>' }}<invoke name=\"tool-name-1\"> {%- if '</think>' in content %}", "minimax_m2", "qwen3"),
    ("please respond with <tool_calls></tool_calls> XML tags", "minimax_m1", None),
    ("<|tool_calls_section_begin|> <think>{{rc}}</think>", "kimi_k2", "kimi_k2"),
    ("respond only with <|tool_call|> followed by a JSON list. Write your thoughts between <think></think>", "granite", "granite"),
    ('{{- "<|channel|>analysis<|message|>" }} {{- "<|channel|>commentary " }}', "gpt_oss", "gpt_oss"),
    ('{{- "<|action_start|><|plugin|>\\n" }}', "internlm", None),
    ('{%- set bom_str = bom_str or "<|bom|>" -%} {{- "<tool_calls>[" }}', "jamba", None),
    ("When using tools, make calls in a single JSON array: ", "xlam", None),
    ('formatted as functools[{"name": [function name]}]', "phi4_mini", None),
    ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "llama4_pythonic", None),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.', "llama3", None),
    ('{{- "[TOOL_CALLS] [" }}', "mistral", None),
    ("{{ message.content }}", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_the_chat_template_selects_the_parsers(template: str, tools: str | None, reasoning: str | None) -> None:
    assert parsers_of_template(template) == (tools, reasoning)


def test_every_format_can_be_selected() -> None:
    assert {tools for _, tools, _ in TEMPLATES if tools} == set(TOOL_PARSERS) - {"qwen"}, "which is the same as hermes"
