"""The forms of a prompt: text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError
from stoker.server.threads import LONG_TOKENS, compute

MAX_PROMPTS = 256
MAX_IDS = 1 << 20  # of all prompts of a request together; a single prompt may always have as many as a sequence


async def read_prompts(prompt: Any, max_ids: int, *, truncated: bool) -> list[str | list[int]]:
    """One prompt or several, each as text or token ids.

    A prompt has at most `max_ids` ids, the length of a sequence, unless it is `truncated` later. Raises RequestError.
    """
    lists = [prompt, *(item for item in prompt[:MAX_PROMPTS] if isinstance(item, list))] if isinstance(prompt, list) else []
    size, limit = sum(map(len, lists)), max(max_ids, MAX_IDS)
    if size > limit:
        reason = f"it has {size} token ids, and the limit of a request is {limit}"
        raise RequestError("prompt", prompt, reason, cure="Send several requests.")
    if not truncated and (longest := max(map(len, lists), default=0)) > max_ids:
        raise RequestError("prompt", prompt, f"it has {longest} token ids, and a sequence has at most {max_ids}", cure="Shorten it.")
    return await compute(_read_prompts, prompt, long=size > LONG_TOKENS)


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a list whose size has been checked. Raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            "prompt", prompt, "it must be text, a list of texts, a list of token ids, or a list of such lists, and not empty"
        )
    if type(prompt[0]) is int:
        return [_ids("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError("prompt", prompt, f"a request has at most {MAX_PROMPTS} prompts", cure="Send several requests.")
    if isinstance(prompt[0], str):
        return [_text(f"prompt[{i}]", item) for i, item in enumerate(prompt)]
    return [_ids(f"prompt[{i}]", item) for i, item in enumerate(prompt)]


def _text(name: str, value: Any) -> str:
    """`value`, checked to be text. Raises RequestError with this name."""
    if not isinstance(value, str):
        raise RequestError(name, value, "the first prompt is text, so it must be text")
    return value


def _ids(name: str, value: Any) -> list[int]:
    """`value`, checked to be a list of whole numbers. Raises RequestError with this name."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise RequestError(name, value, "it must be a list of token ids")
    return value
