"""A chat request that is ready to generate: its prompt is rendered and tokenized, and parsers for its answer are known."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, Guide
from stoker.frontend.prompts import encode_prompt, truncate_prompt
from stoker.frontend.service import Service
from stoker.server.protocols.common.chat.messages import for_template
from stoker.server.protocols.common.chat.tools import ToolUse
from stoker.server.protocols.common.parsers.answer import AnswerParser
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.reasoning.parser import ReasoningParser
from stoker.server.protocols.common.parsers.selection import with_parsers
from stoker.server.settings import ServerSettings


class ChatTurn(msgspec.Struct, kw_only=True):
    """A checked request whose prompt is tokenized."""

    service: Service
    settings: ServerSettings  # with the names of the model's parsers
    request: GenerationRequest
    tools: ToolUse
    one_call: bool  # only the first call of an answer is returned
    opened: bool  # the answer starts inside the reasoning

    @property
    def parsed(self) -> bool:
        """Whether the text of the answer is parsed for reasoning or tool calls."""
        return self.settings.reasoning_parser is not None or self.tools.mode != "none"

    def parser(self) -> AnswerParser:
        """A new parser for one choice."""
        name = self.settings.reasoning_parser
        reasoning = REASONING_PARSERS.get(name)(self.opened) if name is not None else None
        return AnswerParser(reasoning, self.tools.parser(self.settings.tool_parser), one_call=self.one_call)


async def prepare_turn(
    request: GenerationRequest,
    messages: Any,
    service: Service,
    settings: ServerSettings,
    *,
    tools: ToolUse,
    template_values: dict[str, Any],
    max_tokens: int | None,
    one_call: bool = False,
) -> ChatTurn:
    """Render `messages`, which have the form of OpenAI's API, and tokenize the prompt. `request` is modified.

    `max_tokens` of None stands for as many tokens as fit the engine after the prompt. The template adds the special tokens unless
    `request` has add_special_tokens. Raises RequestError.
    """
    settings = with_parsers(settings, service)
    prompt = await service.render_chat(await for_template(messages), **template_values, tools=tools.tools or None)
    ids = await encode_prompt(service, prompt, add_special_tokens=request.add_special_tokens)
    request.prompt = ids = truncate_prompt(ids, request.truncate_prompt_tokens, request.truncation_side)
    changed: dict[str, Any] = {"max_tokens": max_tokens if max_tokens is not None else _default_max_tokens(len(ids), service, settings)}
    if (guide := tools.guide(one_call=one_call)) is not None:
        if request.params.guide is not None:
            limit = "it constrains the answer, and another field does too"
            raise RequestError("tool_choice", tools.forced or tools.mode, limit, cure="Use one of them.")
        changed["guide"] = guide
    parser = tools.parser(settings.tool_parser)
    reasoning = REASONING_PARSERS.get(settings.reasoning_parser) if settings.reasoning_parser is not None else None
    if any(each is not None and each.needs_special_tokens for each in (parser, reasoning)):
        changed["skip_special_tokens"] = False
    request.params = msgspec.structs.replace(request.params, **changed)
    opened = reasoning is not None and reasoning.opened_by(prompt)
    if request.params.guide is not None and reasoning is not None and (guide is None or reasoning.precedes_calls):
        changed_guide, opened = _guide_after_reasoning(request.params.guide, reasoning, opened, service)
        request.params = msgspec.structs.replace(request.params, guide=changed_guide)
    return ChatTurn(service=service, settings=settings, request=request, tools=tools, one_call=one_call, opened=opened)


def _guide_after_reasoning(guide: Guide, reasoning: type[ReasoningParser], opened: bool, service: Service) -> tuple[Guide, bool]:
    """The guide for the text after the reasoning, and whether the answer starts inside the reasoning.

    The guide gets the tokens that start and end the reasoning, between which text is free. If these markers are not single tokens, the
    grammar constrains the answer from its start, so that it contains no reasoning. A structural tag can contain free text, and is returned
    as it is.
    """
    if guide.kind == "structural_tag":
        return guide, opened
    start = _tokens(service, reasoning.start_marker, 1) if reasoning.start_marker and not opened else ()
    end = _tokens(service, reasoning.end_marker, reasoning.max_end_tokens) if reasoning.end_marker else None
    if start is None or end is None:
        return guide, False
    return msgspec.structs.replace(guide, reasoning_start=start[0] if start else None, reasoning_end=end), opened


def _tokens(service: Service, text: str, limit: int) -> tuple[int, ...] | None:
    """The ids of the tokens with this text, if they are at most `limit`."""
    ids = service.encode(text, add_special_tokens=False)
    return tuple(ids) if len(ids) <= limit and service.decode(ids, skip_special_tokens=False) == text else None


async def prepare_raw_turn(
    request: GenerationRequest, prompt: str, service: Service, settings: ServerSettings, *, max_tokens: int | None
) -> ChatTurn:
    """A turn whose prompt is text as it is, and whose answer is not parsed. `request` is modified. Raises RequestError."""
    request.prompt = ids = await encode_prompt(service, prompt, add_special_tokens=request.add_special_tokens)
    limit = max_tokens if max_tokens is not None else _default_max_tokens(len(ids), service, settings)
    request.params = msgspec.structs.replace(request.params, max_tokens=limit)
    plain = msgspec.structs.replace(settings, reasoning_parser=None, tool_parser=None)
    return ChatTurn(service=service, settings=plain, request=request, tools=ToolUse([], "none"), one_call=False, opened=False)


def _default_max_tokens(num_prompt: int, service: Service, settings: ServerSettings) -> int:
    """The setting, or as many tokens as fit the engine after the prompt."""
    if settings.default_max_tokens is not None:
        return settings.default_max_tokens
    return max(1, min(service.info.limits.max_output_len, service.max_seq_len - num_prompt))
