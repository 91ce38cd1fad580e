"""Variables of the chat template that a request sets."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "max_chars")


def read_template_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """The checked field chat_template_kwargs. Raises RequestError for a name that is not a switch of the template."""
    extra: dict[str, Any] = values.get("chat_template_kwargs", {})
    for name in _RESERVED:
        if name in extra:
            raise RequestError(
                f"chat_template_kwargs.{name}", extra[name], "it is not a switch of the template", cure=f"Set {name} in the request itself."
            )
    return extra


def thinking_switches(enabled: bool) -> dict[str, bool]:
    """The variables by which templates turn reasoning on or off: Qwen reads enable_thinking, DeepSeek and Granite read thinking."""
    return {"enable_thinking": enabled, "thinking": enabled}
