"""The value type of locations: directories, hub ids and addresses."""

from __future__ import annotations

import re
from typing import Any

from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Line

MAX_NAME_BYTES = 255  # of a directory; file systems refuse longer names
_CREDENTIAL = re.compile(r"^\w+://[^/?#]*@|[?&][^=&]*(sig|token|key|secret|password|credential)[^=&]*=", re.IGNORECASE)


class Location(Line, frozen=True):
    """A directory, a hub id or an address. An address with a password or signature is refused, because messages print addresses."""

    def check(self, value: Any) -> str:
        text = super().check(value)
        if text.startswith("<") and text.endswith(">"):
            raise InvalidValueError(value, "it is a placeholder", cure="Name a directory, a hub id or an s3:// address.")
        if "://" not in text and max(len(part.encode()) for part in text.split("/")) > MAX_NAME_BYTES:
            raise InvalidValueError(value, f"the names in a path have at most {MAX_NAME_BYTES} bytes")
        if _CREDENTIAL.search(text):
            cure = "Use s3:// with the usual AWS settings, or download it first."
            raise InvalidValueError(value, "the address contains a credential", cure=cure, hidden=True)
        return text
