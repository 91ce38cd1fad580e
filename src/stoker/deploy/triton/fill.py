"""Template variables of a config.pbtxt, filled as tensorrtllm_backend's tools/fill_template.py does."""

from __future__ import annotations

import re
from string import Template

from stoker.base.errors import ConfigError
from stoker.base.registry import nearest

_DEFAULTS = {"max_queue_size": "0"}
_VARIABLE = re.compile(r"\$\{([^}\n]*)\}")


def fill(text: str, substitutions: str) -> str:
    """`text` with each `${k}` of "k:v,k2:v2" replaced; `\\,` and `\\:` in a value are the plain characters. Others stay.

    A pair ends at an unescaped comma and its key at the first colon. `$$` becomes `$`. Raises ConfigError for a pair without a
    colon, and for a key that stands nowhere in the text.
    """
    pairs = dict(map(_pair, filter(None, _split(substitutions, ","))))
    for key in pairs:
        if key not in text:
            near = nearest(key, _VARIABLE.findall(text))
            raise ConfigError(f"the file has no ${{{key}}}.", cure=f"Did you mean {' or '.join(near)}?" if near else "Leave the pair out.")
    return Template(text).safe_substitute(_DEFAULTS | pairs)


def _pair(text: str) -> tuple[str, str]:
    key, *rest = _split(text, ":")
    if not rest or not key.strip():
        raise ConfigError(f"{text!r} is no pair.", cure="Write key:value,key:value; a comma inside a value is \\,.")
    return _plain(key.strip()), _plain(":".join(rest))


def _split(text: str, mark: str) -> list[str]:
    """Split at `mark` where no backslash stands before it; escapes stay as they are."""
    return re.split(rf"(?<!\\){re.escape(mark)}", text)


def _plain(text: str) -> str:
    return text.replace("\\,", ",").replace("\\:", ":")
