"""docs/security.md: every line of its tables names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not re.match(r"\| .* \| defence \| test \|", line)]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:60])
def test_each_line_names_tests_that_exist(line: str) -> None:
    _, threat, defence, named, _ = line.split("|")
    assert threat.strip() and defence.strip()
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", named)
    assert tests
    for path, name in tests:
        assert (ROOT / path).is_file(), path
        assert not name or name in names_in(ROOT / path), name


def test_the_page_says_who_is_trusted() -> None:
    """Each section has a table, and states the trust before it."""
    assert len(SECTIONS) >= 8 and len(LINES) >= 35
    for section in SECTIONS:
        assert "\n|---|---|---|\n" in section, section.partition("\n")[0]
        assert section.partition("\n|")[0].count(".") >= 1
