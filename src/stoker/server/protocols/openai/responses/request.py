"""A request of POST /v1/responses, checked, with its prompt rendered and tokenized."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.common.chat.template_values import read_template_kwargs, thinking_switches
from stoker.server.protocols.common.chat.tools import function_tool
from stoker.server.protocols.common.chat.turn import ChatTurn, prepare_turn
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.openai.call import DEFAULT_TEMPERATURE
from stoker.server.protocols.openai.chat.tool_choice import read_tools
from stoker.server.protocols.openai.fields import MAX_TOKENS
from stoker.server.protocols.openai.responses.fields import REASONING, TABLE, TEXT, TOOL
from stoker.server.protocols.openai.responses.input_items import read_input, to_conversation
from stoker.server.protocols.openai.responses.store import UNFINISHED, ResponseStore, StoreThread
from stoker.server.settings import ServerSettings

_TARGETS = tuple(TABLE.targets().items())
_PASSED = ("priority", "cache_salt", "timeout_s")  # fields of GenerationRequest
MAX_METADATA = 16


class ResponseCall(msgspec.Struct, kw_only=True):
    """A checked request. `context` holds the items of earlier turns, `input` the items of this one."""

    id: str
    values: dict[str, Any]
    turn: ChatTurn
    input: list[dict[str, Any]]
    context: list[dict[str, Any]]

    @property
    def store(self) -> bool:
        """Whether the response is stored. The default is true."""
        return self.values.get("store", True) is True

    @property
    def num_top(self) -> int | None:
        """Number of candidates whose log-probabilities the response contains; None: it contains no log-probabilities."""
        return None if self.turn.request.params.logprobs is None else self.turn.request.params.logprobs


async def read_response_call(values: dict[str, Any], service: Service, settings: ServerSettings, store: StoreThread) -> ResponseCall:
    """Check the fields of a request, which have the types of the table, and render the prompt. Raises RequestError and NotFoundError."""
    _check_combinations(values)
    own = read_input(values.get("input"))
    context = await _previous_items(values, store)
    tools = read_tools(_chat_tools(values))
    params: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, "skip_special_tokens": settings.skip_special_tokens}
    params |= {target: values[name] for name, target in _TARGETS if name in values}
    if "top_k" in values:
        params["top_k"] = max(0, values["top_k"])
    if "message.output_text.logprobs" in values.get("include", ()):
        params["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise RequestError("top_logprobs", values["top_logprobs"], 'it requires include=["message.output_text.logprobs"]')
    if (guide := read_guide(_response_format(values))) is not None:
        params["guide"] = guide
    response_id = f"resp_{secrets.token_hex(24)}"
    passed = {name: values[name] for name in _PASSED if name in values}
    passed.setdefault("timeout_s", settings.request_timeout_s)
    template_values = _template_values(values)

    async def prepare(items: list[dict[str, Any]]) -> ChatTurn:
        """The turn with these items as its conversation. Raises RequestError."""
        request = GenerationRequest(
            request_id=response_id,
            prompt="",
            params=SamplingParams(max_tokens=MAX_TOKENS, **params),  # prepare_turn sets the default
            add_special_tokens=False,
            **passed,
        )
        return await prepare_turn(
            request,
            to_conversation(values.get("instructions"), items).messages,
            service,
            settings,
            tools=tools,
            template_values=template_values,
            max_tokens=values.get("max_output_tokens"),
            one_call=values.get("parallel_tool_calls") is False,
        )

    items = [*context, *own]
    turn = await (_fit(items, prepare, service) if values.get("truncation") == "auto" else prepare(items))
    return ResponseCall(id=response_id, values=values, turn=turn, input=own, context=context)


async def _fit(items: list[dict[str, Any]], prepare: Any, service: Service) -> ChatTurn:
    """The turn with as many of the last items as fit, found by bisection. Instructions and the last item are always part of it."""
    system = [item for item in items if item.get("role") in ("system", "developer")]
    rest = [item for item in items if item.get("role") not in ("system", "developer")]
    starts = [i for i, item in enumerate(rest) if item.get("role") == "user"] or [0]  # a prompt begins with a message of the user
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits([*system, *rest[starts[middle] :]], prepare, service):
            high = middle
        else:
            low = middle + 1
    return await prepare([*system, *rest[starts[low] :]])  # type: ignore[no-any-return]


async def _fits(items: list[dict[str, Any]], prepare: Any, service: Service) -> bool:
    """Whether the prompt of these items leaves room for a new token."""
    try:
        turn = await prepare(items)
    except RequestError as error:
        if error.field in ("messages", "prompt"):  # more characters than the model can read
            return False
        raise
    return len(turn.request.prompt) <= min(service.info.limits.max_input_len, service.max_seq_len - 1)


def _check_combinations(values: dict[str, Any]) -> None:
    """Raise RequestError for fields that exclude each other."""
    if "input" not in values:
        raise RequestError("input", None, "it is missing")
    if len(values.get("metadata", {})) > MAX_METADATA:
        raise RequestError("metadata", values["metadata"], f"it has more than {MAX_METADATA} entries")
    if values.get("background"):
        if values.get("store") is False:
            raise RequestError("background", True, "the response could not be retrieved with store=false", cure="Set store=true.")
        if values.get("stream"):
            raise RequestError(
                "background", True, "a response in the background is not streamed", cure="Set stream=false, and retrieve it."
            )


async def _previous_items(values: dict[str, Any], store: StoreThread) -> list[dict[str, Any]]:
    """All items of the conversation that previous_response_id names. Raises UnknownResponseError, or RequestError if it is not complete."""
    if (previous_id := values.get("previous_response_id")) is None:
        return []
    previous = await store.call(ResponseStore.get, previous_id)
    if previous.status in (*UNFINISHED, "failed"):
        raise RequestError("previous_response_id", previous_id, f"the response is {previous.status}", cure="Continue a completed response.")
    return [*previous.context, *previous.input, *previous.body["output"]]


def _chat_tools(values: dict[str, Any]) -> dict[str, Any]:
    """The fields tools and tool_choice in the form of the chat API. Raises RequestError."""
    converted: dict[str, Any] = {}
    if "tools" in values:
        converted["tools"] = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])]
    choice = values.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        named = [{"function": tool} if isinstance(tool, dict) else tool for tool in listed] if isinstance(listed, list) else listed
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if choice is not None:
        converted["tool_choice"] = choice
    return converted


def _chat_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """The tool in the form of the chat API. Raises RequestError if it is not a function."""
    if tool.get("type") != "function":
        limit = "only functions that the client runs are supported"
        raise RequestError(f"{field}.type", tool.get("type"), limit, cure='Use {"type": "function", "name": …, "parameters": …}.')
    TOOL.check(tool, prefix=f"{field}.")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return function_tool(tool.get("name"), tool.get("description"), parameters, field=field, schema_name="parameters")


def _response_format(values: dict[str, Any]) -> dict[str, Any]:
    """The field text.format in the form of the chat API. Raises RequestError."""
    form = TEXT.check(values.get("text", {}), prefix="text.").get("format")
    if form is None:
        return {}
    if form.get("type") == "json_schema":
        if not isinstance(form.get("schema"), dict):
            raise RequestError("text.format.schema", form.get("schema"), "it must be a JSON schema")
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
    if form.get("type") not in ("text", "json_object"):
        raise RequestError("text.format.type", form.get("type"), "it must be text, json_object or json_schema")
    return {"response_format": {"type": form["type"]}}


def _template_values(values: dict[str, Any]) -> dict[str, Any]:
    """The template's values: chat_template_kwargs, and reasoning.effort as the switches that templates have."""
    template_values = read_template_kwargs(values)
    effort = REASONING.check(values.get("reasoning", {}), prefix="reasoning.").get("effort")
    if effort == "none":
        return {**thinking_switches(False), **template_values}
    return {**template_values, **({"reasoning_effort": effort} if effort is not None else {})}
