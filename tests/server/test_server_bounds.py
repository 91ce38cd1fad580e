"""Bounds that all protocols have in common."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import stoker.server.protocols
from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable
from stoker.base.types import SamplingParams


def rows(name: str) -> Iterator[tuple[str, FieldRow]]:
    """The rows of this name in the field tables of all protocols, with the module of each."""
    for info in pkgutil.walk_packages(stoker.server.protocols.__path__, "stoker.server.protocols."):
        values = vars(importlib.import_module(info.name)).values()
        tables = [table for value in values for table in (value.values() if isinstance(value, dict) else [value])]
        yield from ((info.name, table[name]) for table in tables if isinstance(table, FieldTable) and name in table)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-45, 1e-6, 0.009, 0.01, 1.0, 100.0, 100.1, math.inf, math.nan])
def test_repetition_penalty(value: float) -> None:
    def accepts(check: Any) -> bool:
        try:
            check(value)
        except (InvalidValueError, RequestError):
            return False
        return True

    expected = accepts(lambda number: SamplingParams(repetition_penalty=number))
    found = {module: accepts(row.check) for module, row in rows("repetition_penalty") if row.type is not ANYTHING}
    assert len({module.split(".")[3] for module in found}) >= 4
    assert set(found.values()) == {expected} == {0.01 <= value <= 100}
