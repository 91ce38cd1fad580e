"""Benchmarks and scripts, of which most do not run in tests, import names of the package that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("benchmarks", "scripts", "examples") for path in (ROOT / folder).rglob("*.py"))


def bindings(nodes: list[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind, also in branches and blocks."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Assign() | ast.AnnAssign():
                yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            case _:
                for block in ("body", "orelse", "finalbody"):
                    yield from bindings(getattr(node, block, []))


@cache
def names_of(module: str) -> frozenset[str] | None:
    """The names that can be imported from a module of the package, or None if it does not exist."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    submodules = {child.stem for child in path.iterdir()} if path.is_dir() else set()
    return frozenset(bindings(ast.parse(file.read_text()).body)) | submodules


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(source: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module.partition(".")[0] != "stoker":
            continue
        found = names_of(node.module)
        # A module with `__getattr__` makes names on use.
        missing += [(node.module, alias.name) for alias in node.names if found is None or not {alias.name, "__getattr__"} & found]
    assert missing == []


def test_names_that_do_not_exist_are_found() -> None:
    assert names_of("stoker.kernels.no_module") is None
    names = names_of("stoker.kernels.ops")
    assert names is not None and "expert_up" in names and "no_op" not in names
