"""Tables of a protocol's fields, and the check of a request against one: each field is honoured, without effect, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from stoker.base.errors import RequestError
from stoker.base.registry import nearest
from stoker.server.protocols.openai.kinds import Kind, anything


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One field. `param` is the SamplingParams field it sets as it stands; the others are read by the protocol's own code."""

    name: str
    kind: Kind = anything
    says: str  # the meaning and default of an honoured field; the reason of another
    fate: Literal["honoured", "no effect", "refused"] = "honoured"
    param: str = ""
    harmless: tuple[Any, ...] = ()  # values of a refused field that ask for nothing


def checked(given: Mapping[str, Any], rows: Mapping[str, Row], *, inside: str = "", noun: str = "field") -> dict[str, Any]:
    """The honoured fields with their checked values; null counts as absent. Raises RequestError with the nearest names.

    `inside` stands before each name in an error, and `noun` says what the table's rows are called there.
    """
    values = {}
    for name, value in given.items():
        row = rows.get(name)
        if row is None:
            near = nearest(name, list(rows))
            cure = f"Did you mean {' or '.join(near)}?" if near else "Leave it out."
            raise RequestError(f"{inside}{name[:80]}", value, f"there is no such {noun}", cure=cure)
        if value is None:
            continue
        if row.fate == "refused":
            if value not in row.harmless:
                raise RequestError(f"{inside}{name}", value, row.says, cure="Leave it out.")
            continue
        found = row.kind(f"{inside}{name}", value)
        if row.fate == "honoured":
            values[name] = found
    return values
