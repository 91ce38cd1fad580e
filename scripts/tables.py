"""The tables of settings, parameters and fields in docs/sagemaker.md and docs/openai.md: `python scripts/tables.py` writes them anew.

A table stands between <!-- table: NAME --> and <!-- end -->.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stoker.deploy import lmi_table
from stoker.deploy.fields import Field
from stoker.server.protocols.openai import fields
from stoker.server.protocols.sagemaker import parameters

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("sagemaker.md", "openai.md")
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    """A page with its tables made anew."""
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


def _parameters() -> str:
    return _table(("parameter", "here", ""), ((f"`{row.name}`", row.fate, _says(row)) for row in parameters.TABLE))


def _fields() -> str:
    rows = ((f"`{row.name}`", ", ".join(row.doors), row.fate, _says(row)) for row in fields.TABLE)
    return _table(("field", "of", "here", ""), rows)


def _says(row: Any) -> str:
    harmless = [_spelled(value) for value in row.harmless if value != ""]
    return f"{row.says}; {', '.join(dict.fromkeys(harmless))} is accepted" if harmless else row.says


def _spelled(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


TABLES: dict[str, Callable[[], str]] = {"keys": _keys, "environment": _environment, "parameters": _parameters, "fields": _fields}


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
