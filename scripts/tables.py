"""Writes the tables of settings, parameters and fields in docs/{openai,sagemaker,truss}.md: run `python scripts/tables.py`.

A table is the text between <!-- table: NAME --> and <!-- end -->.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stoker.base.fields.table import FieldRow
from stoker.deploy import lmi_table
from stoker.deploy.fields import Field
from stoker.server.protocols.openai import fields
from stoker.server.protocols.sagemaker import parameters as sagemaker
from stoker.server.protocols.truss import parameters as truss

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("sagemaker.md", "openai.md", "truss.md")
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    """The text of a page with its tables generated again."""
    return _PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], (DOCS / name).read_text(encoding="utf-8"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _keys() -> str:
    return _table(("key", "here", ""), ((f"`{row.key}`", row.fate, _key_says(row)) for row in lmi_table.TABLE.values()))


def _key_says(row: Field) -> str:
    if row.to:
        name = row.to.partition(".")[2] or row.to
        return f"{name}; {row.also}" if row.also else name
    if row.no_effect:
        return row.no_effect
    harmless = ", ".join(_spelled(value) for value in row.harmless if value != "")
    hint = row.hint[:1].lower() + row.hint[1:].rstrip(".")
    return "; ".join(part for part in (row.refused, harmless and f"{harmless} is accepted", hint) if part)


def _environment() -> str:
    above = ((f"`{name}`", f"`{key}`", "wins over the file") for name, key in lmi_table.OVERRIDES.items())
    below = ((f"`{name}`", f"`{key}`", "where the file is silent") for name, key in lmi_table.ENVIRONMENT.items())
    rest = (
        ("`SAGEMAKER_MAX_PAYLOAD_IN_MB`", "`max_request_size`", "wins over the file; in MiB"),
        ("`OPTION_NAME`", "`option.name`", "where the file and the variables above are silent"),
        ("`SERVING_NAME`", "`name`", "where all others are silent"),
        ("`HF_TOKEN`", "", "opens private repositories; it is given to the download alone"),
    )
    return _table(("variable", "key", ""), (*above, *below, *rest))


def _fields(noun: str, rows: Iterable[FieldRow]) -> str:
    return _table((noun, "status", "meaning, or reason"), ((f"`{row.name}`", row.status, _description(row)) for row in rows))


def _description(row: FieldRow) -> str:
    harmless = dict.fromkeys(_spelled(value) for value in row.harmless if value != "")
    allowed = f"{', '.join(harmless)} is accepted" if harmless else ""
    alternative = row.alternative[:1].lower() + row.alternative[1:].rstrip(".")
    return "; ".join(part for part in (row.meaning or row.reason, allowed, alternative) if part)


def _spelled(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


TABLES: dict[str, Callable[[], str]] = {
    "keys": _keys,
    "environment": _environment,
    "parameters": lambda: _fields("parameter", sagemaker.TABLE),
    "truss": lambda: _fields("field", truss.TABLE),
    "both": lambda: _fields("field", fields.BOTH),
    "completions": lambda: _fields("field", fields.COMPLETIONS_ONLY),
    "chat": lambda: _fields("field", fields.CHAT_ONLY),
}


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
