"""The forms of a prompt: text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError

MAX_PROMPTS = 256


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each as text or token ids. Raises RequestError."""
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
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestError(name, value, "it must be a list of token ids")
    return value
