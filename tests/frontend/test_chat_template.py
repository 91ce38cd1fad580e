"""Chat templates render as in transformers, in a sandbox, and invalid messages are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_tokenizers import REAL, real

from stoker.base.env import cache_dir
from stoker.base.errors import EngineError, RequestError
from stoker.frontend.chat_template import ChatTemplate, cut_at_mark

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": 'Hi <&> "you"'}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye "}]


def render(source: str, messages: Any = CHAT, **values: Any) -> str:
    return run(ChatTemplate(source, {"bos_token": "<s>"}), messages, **{"max_chars": 10_000, **values})


def run(template: ChatTemplate, messages: Any, **values: Any) -> str:
    """Render in this process, without limits; test_chat_rendering.py tests the process with limits."""
    text = template.run(template.variables(messages, **values), values["max_chars"])
    return cut_at_mark(text) if values.get("continue_final_message") else text


def test_chatml() -> None:
    assert render(CHATML, CHAT[:1]) == '<|im_start|>user\nHi <&> "you"<|im_end|>\n<|im_start|>assistant\n'
    assert render(CHATML, CHAT[:1], add_generation_prompt=False) == '<|im_start|>user\nHi <&> "you"<|im_end|>\n'


@pytest.mark.parametrize("name", [name for name in REAL if name != "llama2"])
def test_published_templates_equal_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    real(name)
    config = json.loads((cache_dir() / "test-tokenizers" / name / "package/models/tokenizer_config.json").read_text())
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    tool = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object", "properties": {}}}}
    for tools in (None, [tool]) if "tools" in config["chat_template"] else (None,):
        want, _ = render_jinja_template([CHAT], chat_template=config["chat_template"], tools=tools, add_generation_prompt=True, **special)
        assert run(ChatTemplate(config["chat_template"], special), CHAT, max_chars=100_000, tools=tools) == want[0]


@pytest.mark.parametrize("source", [CHATML, CHATML.replace("message['content']", "(message['content'] | trim)")])
def test_continue_final_message_equals_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    want, _ = render_jinja_template([CHAT], chat_template=source, continue_final_message=True)
    assert render(source, add_generation_prompt=False, continue_final_message=True) == want[0]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SECOND_TURN = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}", "user:Hi;assistant:;tool:2;"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "Hi;;2;"),
        ("{% for m in messages %}{{ m.content | trim | length }};{% endfor %}", "2;0;1;"),
        ("{% for m in messages %}{{ 'calls' if m.content is none else m.content }};{% endfor %}", "Hi;calls;2;"),
        ("{% for m in messages %}{{ m.content if m.content != none else 'calls' }};{% endfor %}", "Hi;calls;2;"),
        ("{% for m in messages %}{% if m.content is string and m.content %}{{ m.content }};{% endif %}{% endfor %}", "Hi;2;"),
    ],
)
def test_a_call_without_content_renders(source: str, expected: str, missing: bool) -> None:
    call = {name: value for name, value in SECOND_TURN[1].items() if name != "content" or not missing}
    assert render(source, [SECOND_TURN[0], call, SECOND_TURN[2]]) == expected


@pytest.mark.parametrize("name", [name for name in REAL if name in ("qwen3", "deepseek_v3")])
def test_published_templates_render_the_second_turn_of_a_tool_loop(name: str) -> None:
    """As in transformers: Qwen's template fails there without text, and DeepSeek's recognizes calls by a content of None."""
    from transformers.utils.chat_template_utils import render_jinja_template

    real(name)
    source = json.loads((cache_dir() / "test-tokenizers" / name / "package/models/tokenizer_config.json").read_text())["chat_template"]
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    function = {"name": "f", "arguments": '{"x": 1}' if name == "deepseek_v3" else {"x": 1}}
    messages = [SECOND_TURN[0], {**SECOND_TURN[1], "tool_calls": [{**CALL, "function": function}]}, SECOND_TURN[2]]
    independent = [{**m, "content": "" if m["content"] is None and name == "qwen3" else m["content"]} for m in messages]
    want, _ = render_jinja_template([independent], chat_template=source, add_generation_prompt=True, **special)
    assert "f" in want[0] and run(ChatTemplate(source, special), messages, max_chars=100_000) == want[0]


def test_tools_need_a_template_that_renders_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="does not render tools"):
        render(CHATML, tools=tools)
    assert render(CHATML, tools=None) == render(CHATML)
    assert render("{% if tools %}{{ tools[0].function.name }}{% endif %}", tools=tools) == "f"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_functions_and_extensions_of_templates() -> None:
    source = "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}{{ mode }}"
    assert render(source, mode="x") == '<s>{"role": "user", "content": "Hi <&> \\"you\\""}x'
    assert render("{% generation %}a{% endgeneration %}{{ strftime_now('%Y') | length }}") == "a4"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[0\]\.content\[0\]\.type='image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
        ([{"role": "user", "content": "x" * 10_001}], "10001 characters"),
    ],
)
def test_messages_are_refused_by_name(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def test_a_template_in_a_request_is_refused() -> None:
    with pytest.raises(RequestError, match="chat_template"):
        render(CHATML, chat_template="{{ 1 }}")


def test_broken_template_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="cannot be compiled"):
        ChatTemplate("{% if %}", {})
