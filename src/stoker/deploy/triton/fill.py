"""Fills the template variables of a config.pbtxt like tools/fill_template.py of tensorrtllm_backend."""

from __future__ import annotations

import re
from string import Template

from stoker.base.errors import ConfigError

_DEFAULTS = {"max_queue_size": "0"}


def fill_template(text: str, substitutions: str) -> str:
    r"""`text` with each `${k}` of "k:v,k2:v2" replaced. Other variables are left, and pairs without a variable have no effect.

    A pair ends at an unescaped comma, and its key at the first colon. `\\,` and `\\:` are the plain characters, and `$$` becomes `$`.
    Raises ConfigError for a pair without a colon.
    """
    pairs = dict(map(_pair, filter(None, _split(substitutions, ","))))
    return Template(text).safe_substitute(_DEFAULTS | pairs)


def _pair(text: str) -> tuple[str, str]:
    """(key, value) of a pair. Raises ConfigError without a colon."""
    key, *rest = _split(text, ":")
    if not rest or not key.strip():
        raise ConfigError(f"{text!r} is not a pair.", cure="Write key:value,key:value; a comma inside a value is \\,.")
    return _unescape(key.strip()), _unescape(":".join(rest))


def _split(text: str, mark: str) -> list[str]:
    """The parts of `text` between unescaped `mark` characters. Escapes are retained."""
    return re.split(rf"(?<!\\){re.escape(mark)}", text)


def _unescape(text: str) -> str:
    r"""The text with each \, and \: replaced by the character after the backslash."""
    return text.replace("\\,", ",").replace("\\:", ":")
