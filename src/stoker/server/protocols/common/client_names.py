"""Errors with the names and values of the fields that a client sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.base.errors import RequestError


def with_client_name(error: RequestError, names: Mapping[str, str], body: Mapping[str, Any]) -> RequestError:
    """The error with the name and value of the field that the client sent. `names` maps Stoker's own names to those of the API.

    A name stands for its members, too: "guide" for "guide.text". Fields that the client sent under Stoker's name remain. The names are
    also replaced in the text of the error.
    """
    names = {own: sent for own, sent in names.items() if body.get(own) is None}
    root = re.split(r"[.\[]", error.field, maxsplit=1)[0]
    sent = names.get(error.field, names.get(root, error.field))
    limit, cure = (_replace_words(text, names) for text in (error.limit, error.cure))
    return RequestError(sent, _value(error, sent, body), limit, cure=cure)


def without_truncation(error: RequestError) -> RequestError:
    """The error without the advice to set truncate_prompt_tokens, for an API that has no such field."""
    cure = error.cure.replace(", or set truncate_prompt_tokens", "")
    return RequestError(error.field, error.value, error.limit, cure=cure)


def _value(error: RequestError, sent: str, body: Mapping[str, Any]) -> Any:
    """The value that the client sent in the field `sent` of `body`.

    If the error concerns one element of it, such as one of several token ids, that element.
    """
    value: Any = body
    for key in sent.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    is_part = sent == error.field and isinstance(error.value, (str, int)) and not isinstance(value, float)
    return error.value if value is None or is_part else value


def _replace_words(text: str, names: Mapping[str, str]) -> str:
    """The text with each of Stoker's names replaced, where it is used as a name: `max_tokens=5`, but not the word prompt."""
    for own, sent in names.items():
        if "_" in own or own == "guide":
            text = re.sub(rf"(?<![\w-]){re.escape(own)}(?!\w)", sent, text)
    return text
