"""/v1/chat/completions: messages to prompt, whole and streamed responses, reasoning and tool calls."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from live_http import asgi_client, events
from scripted_service import ScriptedService

from stoker.base.types import FinishReason, Guide
from stoker.frontend.chat_template import ChatTemplate
from stoker.server.protocols.common.chat.messages import with_parsed_arguments

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich </tool_call>"}}\n</tool_call>'


async def post(service: ScriptedService, body: dict[str, Any], **settings: Any) -> Any:
    async with asgi_client(service, **settings) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
        assert answer.status_code == 200, answer.text
        return events(answer.text) if body.get("stream") else answer.json()


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    """The messages, as they arrive in the process that renders templates, in a template."""
    template = ChatTemplate(source, {})
    return template.run(pickle.loads(pickle.dumps(template.variables(messages, max_chars=100))), 100)


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """Choices in order. The first chunk of each has the role, the last one has the finish_reason, tool calls are numbered from 0."""
    assert chunks[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            index, delta = part["index"], part["delta"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                choices[index] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "logprobs": []}
                continue
            choice = choices[index]
            assert choice["finish_reason"] is None and "role" not in delta
            choice["content"] += delta.get("content", "")
            choice["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                index = call.pop("index")
                if "id" in call:
                    assert index == len(choice["tool_calls"])
                    choice["tool_calls"].append(call)
                else:
                    assert index == len(choice["tool_calls"]) - 1 and list(call["function"]) == ["arguments"]
                    choice["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
    assert all(choice["finish_reason"] for choice in choices.values())
    return [choices[i] for i in range(len(choices))]


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(call["id"] and call["type"] == "function" for call in calls) and len({call["id"] for call in calls}) == len(calls)
    return [call["function"] for call in calls]


async def whole_and_streamed(answers: tuple[str, ...], body: dict[str, Any], group: int, **settings: Any) -> list[dict[str, Any]]:
    """The choices of the whole response, after a check that the joined stream equals them."""
    whole = await post(ScriptedService(*answers, group=group, max_output_len=1024), body, **settings)
    service = ScriptedService(*answers, group=group, max_output_len=1024)
    streamed = joined(await post(service, {**body, "stream": True}, **settings))
    assert len(streamed) == len(whole["choices"])
    for choice, parts in zip(whole["choices"], streamed, strict=True):
        message = choice["message"]
        assert parts["content"] == (message["content"] or "")
        assert parts["reasoning_content"] == (message.get("reasoning_content") or "")
        assert without_ids(parts["tool_calls"]) == without_ids(message.get("tool_calls", []))
        assert parts["finish_reason"] == choice["finish_reason"]
        assert parts["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    return whole["choices"]


async def test_a_whole_response() -> None:
    service = ScriptedService("Hello!")
    answer = await post(service, {})
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt = service.requests[0].prompt
    assert bytes(prompt).decode() == "<user>hi<assistant>", "the template adds the special tokens, and the tokenizer adds none"  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize("body", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 4}])
async def test_the_joined_stream_equals_the_whole_response(body: dict[str, Any], group: int) -> None:
    await whole_and_streamed(("Hello, wörld 🎉!", "zwei", "three"), body, group)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (f"Let me look. \n{CALL}", "Let me look.", ["weather"]),
        (f'{CALL}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>', None, ["weather", "time"]),
        ('<tool_call>{"name": "time"', '<tool_call>{"name": "time"', []),
        ('<tool_call>{"name": "time", "arguments": {}}', None, ["time"]),
        ("a < b <tool_ and so on \n", "a < b <tool_ and so on \n", []),
        ("", "", []),
    ],
)
async def test_hermes_calls(answer: str, content: str | None, calls: list[str], group: int) -> None:
    (choice,) = await whole_and_streamed((answer,), {"tools": TOOLS}, group, tool_parser="hermes")
    assert choice["message"]["content"] == content
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert [call["name"] for call in functions] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    if calls and calls[0] == "weather":
        assert json.loads(functions[0]["arguments"]) == {"city": "Zürich </tool_call>"}


@pytest.mark.parametrize("group", [1, 4, 1000])
@pytest.mark.parametrize(
    ("parser", "answer", "content", "calls"),
    [
        ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', None, ["weather"]),
        ("llama3", '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "weather", "arguments": {}}', None, ["time", "weather"]),
        ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", "<|python is a snake", "<|python is a snake", []),
        ("llama3", "Just text {", "Just text {", []),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {}}]',
            None,
            ["weather", "time"],
        ),
        ("mistral", 'Sure. [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time{}', "Sure.", ["weather", "time"]),
        ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("mistral", "[TOOL_ box", "[TOOL_ box", []),
    ],
)
async def test_other_formats_of_calls(parser: str, answer: str, content: str | None, calls: list[str], group: int) -> None:
    (choice,) = await whole_and_streamed((answer,), {"tools": TOOLS}, group, tool_parser=parser)
    assert choice["message"]["content"] == content
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == calls


WEATHER = '{"name": "weather", "arguments": {"city": "Oslo, and more of it"}}'
FORCED = {"type": "function", "function": {"name": "weather"}}
STREAMED = {
    "hermes": f"<tool_call>{WEATHER}</tool_call>",
    "llama3": WEATHER.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{WEATHER}]",
    "required": f"[{WEATHER.replace('arguments', 'parameters')}]",
    "forced": '{"city": "Oslo, and more of it"}',
}


@pytest.mark.parametrize("name", STREAMED)
async def test_arguments_are_streamed_before_the_call_is_complete(name: str) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "stream": True}
    if name in ("required", "forced"):
        body["tool_choice"] = "required" if name == "required" else FORCED
    service = ScriptedService(STREAMED[name], max_output_len=1024)
    chunks = await post(service, body, tool_parser=name if "tool_choice" not in body else None)
    deltas = [call for chunk in chunks[:-1] for part in chunk["choices"] for call in part["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "weather" and all(list(delta) == ["index", "function"] for delta in deltas[1:])
    arguments = [delta["function"]["arguments"] for delta in deltas]
    assert len(arguments) > 20 and json.loads("".join(arguments)) == {"city": "Oslo, and more of it"}
    assert max(map(len, arguments)) <= 2, "a token is one byte, so each part has about one"


@pytest.mark.parametrize("group", [1, 5, 1000])
@pytest.mark.parametrize("parser", ["hermes", "llama3", "mistral", "required"])
@pytest.mark.parametrize("after", ["", '{"na', '{"name": "time", "arguments": {"zone": "Eur'])
async def test_complete_calls_survive_truncation(parser: str, after: str, group: int) -> None:
    """With an incomplete call as its last one if its arguments have started; OpenAI's finish_reason is then length."""
    first, second = (text.replace("arguments", "parameters") if parser in ("llama3", "required") else text for text in (WEATHER, after))
    formats = {
        "hermes": "<tool_call>{}</tool_call><tool_call>{}",
        "llama3": "{}; {}",
        "mistral": "[TOOL_CALLS][{}, {}",
        "required": "[{}, {}",
    }
    answer = formats[parser].replace("{}", first, 1).replace("{}", second)
    body = {"tools": TOOLS, "max_tokens": len(answer), **({"tool_choice": "required"} if parser == "required" else {})}
    (choice,) = await whole_and_streamed((answer + "x" * 50,), body, group, tool_parser=None if parser == "required" else parser)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls[0] == {"name": "weather", "arguments": '{"city": "Oslo, and more of it"}'}
    assert [call["name"] for call in calls] == ["weather", "time"][: 2 if "Eur" in after else 1]
    assert len(calls) == 1 or calls[1]["arguments"] == '{"zone": "Eur'
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("group", [1, 1000])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "time", "arguments": {"x": "a\nb"}}', '{"x": "a\\u000ab"}'),  # a raw newline inside a string
        ('{"arguments": {"x": 1}, "name": "time"}', '{"x": 1}'),
        ('{"name": "time", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "time"}', "{}"),
        ('{"name": "time", "arguments": {"x": 1}', '{"x": 1}'),  # the last brace is missing
        ('{"id": "7", "type": "function", "name": "time", "arguments": {"x": "}"}}', '{"x": "}"}'),
    ],
)
async def test_forms_of_a_call_object(text: str, arguments: str, group: int) -> None:
    (choice,) = await whole_and_streamed((f"<tool_call>{text}</tool_call>",), {"tools": TOOLS}, group, tool_parser="hermes")
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "time", "arguments": arguments}]


async def test_special_tokens_are_text_only_if_a_parser_needs_them() -> None:
    for parser, skip in (("mistral", False), ("llama3", False), ("hermes", True)):
        service = ScriptedService("!")
        await post(service, {"tools": TOOLS}, tool_parser=parser)
        await post(service, {}, tool_parser=parser)
        assert [request.params.skip_special_tokens for request in service.requests] == [skip, True]


async def test_mistral_ids_are_nine_letters_and_digits() -> None:
    (choice,) = (await post(ScriptedService("[TOOL_CALLS]time{}"), {"tools": TOOLS}, tool_parser="mistral"))["choices"]
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9 and choice["message"]["tool_calls"][0]["id"].isalnum()


@pytest.mark.parametrize("group", [1, 1000])
async def test_only_one_call_without_parallel_tool_calls(group: int) -> None:
    (choice,) = await whole_and_streamed((CALL + CALL,), {"tools": TOOLS, "parallel_tool_calls": False}, group, tool_parser="hermes")
    assert len(choice["message"]["tool_calls"]) == 1


async def test_the_grammar_of_required_calls_allows_one_without_parallel_tool_calls() -> None:
    service = ScriptedService("[]")
    for parallel in (True, False):
        await post(service, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel})
    guides = [request.params.guide for request in service.requests]
    assert [json.loads(guide.text).get("maxItems") for guide in guides if guide is not None] == [None, 1]


async def test_tool_choice_none_ignores_tools() -> None:
    service = ScriptedService(CALL)
    answer = await post(service, {"tools": TOOLS, "tool_choice": "none"}, tool_parser="hermes")
    assert answer["choices"][0]["message"]["content"] == CALL and service.rendered[0][1]["tools"] is None


@pytest.mark.parametrize("group", [1, 1000])
async def test_forced_and_required_calls(group: int) -> None:
    forced = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}
    (choice,) = await whole_and_streamed(('{"city": "Oslo"}',), forced, group)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "stop", "OpenAI's finish_reason is tool_calls only if the model chose to call"
    required = {"tools": TOOLS, "tool_choice": "required"}
    (choice,) = await whole_and_streamed(('[{"name": "weather", "parameters": {"city": "Oslo"}}]',), required, group)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    service = ScriptedService("[]")
    await post(service, required)
    guide = service.requests[0].params.guide
    assert guide is not None and guide.kind == "json_schema"
    assert {call["properties"]["name"]["const"] for call in json.loads(guide.text)["items"]["anyOf"]} == {"weather", "time"}


@pytest.mark.parametrize("group", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("parser", "ending", "answer", "reasoning", "content"),
    [
        ("qwen3", "<assistant>", "<think>\nhm, \n\nso\n</think>\n\nYes.", "hm, \n\nso", "Yes."),
        ("qwen3", "<assistant>", "  No thought.", None, "  No thought."),
        ("qwen3", "<assistant><think>\n", "hm</think>Yes.", "hm", "Yes."),
        ("qwen3", "<assistant>", "<think>cut off ", "cut off", None),
        ("qwen3", "<assistant>", "<thin ice", None, "<thin ice"),
        ("qwen3", "<assistant>", "<think>\n\n</think>\n\nYes", None, "Yes"),
        ("deepseek_r1", "<assistant>", "hm </think>\nYes.", "hm", "Yes."),
        ("deepseek_r1", "<assistant>", "<think>hm</think>Yes </think> so", "hm", "Yes </think> so"),
        ("deepseek_r1", "<assistant>", "never ends", "never ends", None),
    ],
)
async def test_reasoning_is_separated(
    parser: str, ending: str, answer: str, reasoning: str | None, content: str | None, group: int
) -> None:
    (choice,) = await whole_and_streamed((answer,), {"chat_template_kwargs": {"ending": ending}}, group, reasoning_parser=parser)
    assert choice["message"]["reasoning_content"] == reasoning and choice["message"]["content"] == content


@pytest.mark.parametrize("group", [1, 1000])
async def test_reasoning_before_calls(group: int) -> None:
    (choice,) = await whole_and_streamed(
        (f"<think>a call</think>\n{CALL}",), {"tools": TOOLS}, group, tool_parser="hermes", reasoning_parser="qwen3"
    )
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("a call", None) and len(message["tool_calls"]) == 1


async def test_logprobs_contain_bytes_and_candidates() -> None:
    answer = await post(ScriptedService("é"), {"logprobs": True, "top_logprobs": 1})
    first = answer["choices"][0]["logprobs"]["content"][0]
    token = {"token": "bytes:\\xc3", "logprob": -0.25, "bytes": [0xC3]}
    assert first == {**token, "top_logprobs": [token]}


async def test_variables_of_the_template() -> None:
    service = ScriptedService("!")
    body = {
        "tools": TOOLS,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
    }
    await post(service, body, tool_parser="hermes")
    assert service.rendered[0][1] == {
        "tools": TOOLS,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "enable_thinking": False,
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
    }


async def test_the_template_receives_arguments_of_earlier_calls_as_objects() -> None:
    service = ScriptedService("!")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call, broken]}, {"role": "tool", "content": "2"}]
    await post(service, {"messages": messages})
    calls = service.rendered[0][0][1]["tool_calls"]
    assert [item["function"]["arguments"] for item in calls] == [{"x": 1}, "{"]
    text = rendered("{{ '>' + messages[1].tool_calls[0].function.arguments + '<' }}", service.rendered[0][0])
    assert text == '>{"x": 1}<', "DeepSeek's templates concatenate the arguments"


@pytest.mark.parametrize(
    ("body", "settings", "expected"),
    [
        ({}, {}, 128),  # max_output_len
        ({"max_tokens": 7}, {}, 7),
        ({"max_completion_tokens": 8}, {}, 8),
        ({"max_tokens": 9, "max_completion_tokens": 9}, {}, 9),
        ({}, {"default_max_tokens": 11}, 11),
    ],
)
async def test_max_tokens(body: dict[str, Any], settings: dict[str, Any], expected: int) -> None:
    service = ScriptedService("!")
    await post(service, body, **settings)
    assert service.requests[0].params.max_tokens == expected


async def test_the_default_of_max_tokens_is_what_the_prompt_leaves() -> None:
    service = ScriptedService("!", max_total_len=50)
    await post(service, {})
    assert service.requests[0].params.max_tokens == 50 - len("<user>hi<assistant>")


async def test_a_deadline_is_the_stop_reason() -> None:
    service = ScriptedService("abc")
    plan = service._plan

    def plan_with_deadline(*args: Any) -> Any:
        deltas = plan(*args)
        deltas[-1].finish_reason = FinishReason.DEADLINE
        return deltas

    service._plan = plan_with_deadline  # type: ignore[method-assign]
    choice = (await post(service, {}))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", "deadline")


@pytest.mark.parametrize("guide", [{"guided_regex": ".*"}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_without_tokens_for_markers_a_constrained_answer_starts_without_reasoning(guide: dict[str, Any]) -> None:
    """Although the prompt, or the parser, opens the reasoning. Otherwise, the whole answer would be reasoning."""
    body = {**guide, "chat_template_kwargs": {"ending": "<think>\n"}}
    for parser in ("qwen3", "deepseek_r1"):
        answer = '[{"name": "time", "parameters": {}}]'
        (choice,) = await whole_and_streamed((answer,), body, 3, reasoning_parser=parser)
        assert choice["message"]["reasoning_content"] is None
        assert choice["message"]["content"] == answer or choice["message"]["tool_calls"][0]["function"]["name"] == "time"


class MarkerTokens(ScriptedService):
    """The markers of reasoning are single tokens."""

    IDS = {"<think>": 300, "</think>": 301, "<|channel|>": 302, "final": 303, "<|message|>": 304}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "<|channel|>final<|message|>":
            return [302, 303, 304]
        return [self.IDS[text]] if text in self.IDS else super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        texts = {token: text for text, token in self.IDS.items()}
        return "".join(texts.get(token) or chr(token) for token in token_ids)


@pytest.mark.parametrize(
    ("parser", "ending", "answer", "start", "end"),
    [
        ("qwen3", "<assistant>", "<think>hm</think>[]", 300, (301,)),
        ("qwen3", "<think>\n", "hm</think>[]", None, (301,)),
        ("deepseek_r1", "<assistant>", "hm</think>[]", None, (301,)),
        (
            "gpt_oss",
            "<assistant>",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>[]",
            None,
            (302, 303, 304),
        ),
    ],
)
async def test_a_grammar_constrains_what_follows_the_reasoning(
    parser: str, ending: str, answer: str, start: int | None, end: tuple[int, ...]
) -> None:
    body = {"guided_json": {"type": "array"}, "chat_template_kwargs": {"ending": ending}}
    service = MarkerTokens(answer)
    (choice,) = (await post(service, body, reasoning_parser=parser))["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "[]")
    assert service.requests[0].params.guide == Guide("json_schema", '{"type":"array"}', reasoning_end=end, reasoning_start=start)
    (choice,) = (await post(MarkerTokens("[]"), body))["choices"]
    assert choice["message"]["content"] == "[]", "without a reasoning parser, the answer is the constrained text"


async def test_special_tokens_are_text_if_the_reasoning_parser_needs_them() -> None:
    for parser, skip in (("qwen3", True), ("gpt_oss", False)):
        service = ScriptedService("!")
        await post(service, {}, reasoning_parser=parser)
        assert [request.params.skip_special_tokens for request in service.requests] == [skip]


def test_arguments_of_earlier_calls_print_as_json() -> None:
    """InternLM's template prints them."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": true}'}}
    messages = with_parsed_arguments([{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    assert rendered("{{ messages[1].tool_calls[0].function.arguments | string }}", messages) == '{"x": true}'


@pytest.mark.parametrize("settings", [{}, {"tool_parser": "auto"}, {"reasoning_parser": "auto"}])
async def test_parsers_are_selected_by_the_chat_template(settings: dict[str, Any]) -> None:
    """Tools by default, reasoning with the name auto."""
    service = ScriptedService(f"<think>hm</think>{CALL}")
    service.chat_template = "<tool_call> </think>"
    (choice,) = (await post(service, {"tools": TOOLS}, **settings))["choices"]
    message = choice["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message.get("reasoning_content") == ("hm" if "reasoning_parser" in settings else None)
    assert message["content"] == (None if "reasoning_parser" in settings else "<think>hm</think>")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_templates_receive_the_reasoning_of_earlier_messages(name: str) -> None:
    """As reasoning_content (Qwen, GLM, Kimi), or as thinking (gpt-oss), whose template refuses it beside content."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = with_parsed_arguments(
        [{"role": "assistant", name: "hm", "tool_calls": [call]}, {"role": "assistant", name: "so", "content": "x"}]
    )
    assert rendered("{% for m in messages %}[{{ m.reasoning_content }} {{ m.thinking or '' }}]{% endfor %}", messages) == "[hm hm][so ]"
