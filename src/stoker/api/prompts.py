"""The arguments of `LLM.generate` and `LLM.chat` as lists: one prompt or several, one conversation or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import RequestError, RequestTypeError
from stoker.base.types import SamplingParams

Prompt = str | list[int]
Conversation = list[dict[str, Any]]

_PROMPT = "it must be a string or a list of token ids"


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """(the prompts, whether it was a single one). Raises RequestTypeError for anything but prompts."""
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, (list, tuple)):
        raise RequestTypeError("prompts", prompts, "it must be a string, a list of token ids, or a list of those")
    if prompts and type(prompts[0]) is int:
        return [_prompt("prompts", prompts)], True
    return [_prompt(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)], False


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """The sampling parameters of `count` prompts. Raises RequestTypeError for a wrong type, RequestError for a wrong number."""
    each = list(params) if isinstance(params, (list, tuple)) else [SamplingParams() if params is None else params] * count
    if wrong := [value for value in each if not isinstance(value, SamplingParams)]:
        raise RequestTypeError("params", wrong[0], "it must be SamplingParams, or a list of them")
    if len(each) != count:
        raise RequestError("params", each, f"there are {len(each)} values for {count} prompts", cure="Give one value, or one per prompt.")
    return each


def as_conversations(messages: Any) -> tuple[list[Conversation], bool]:
    """(the conversations, whether it was a single one). Raises RequestTypeError for anything but lists of messages."""
    if not isinstance(messages, (list, tuple)):
        raise RequestTypeError("messages", messages, "it must be a list of messages, or a list of conversations")
    if not messages:
        raise RequestError("messages", messages, "it must be a list of at least one message")
    if isinstance(messages[0], Mapping):
        return [_conversation("messages", messages)], True
    return [_conversation(f"messages[{i}]", conversation) for i, conversation in enumerate(messages)], False


def _prompt(field: str, prompt: Any) -> Prompt:
    """The prompt, checked to be text or a list of token ids. Raises RequestTypeError with the name `field`."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not all(type(token) is int for token in prompt):
        raise RequestTypeError(field, prompt, _PROMPT)
    return list(prompt)


def _conversation(field: str, messages: Any) -> Conversation:
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestTypeError(field, messages, "it must be a list of messages, which are dictionaries with role and content")
    return [dict(message) for message in messages]
