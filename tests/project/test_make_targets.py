"""The Makefile names test files that exist, and the documentation names targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))


def test_test_files_that_the_makefile_names_exist() -> None:
    named = re.findall(r"tests/[\w./]+", MAKEFILE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_phony_lists_all_targets() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == TARGETS


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "docs/release.md", ".github/workflows/ci.yml", ".github/workflows/lint.yml"]
)
def test_named_targets_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`|run: make ([a-z-]+)|^    make ([a-z-]+)", text, re.MULTILINE))
    assert {word for found in named for word in found if word} - TARGETS == set()
