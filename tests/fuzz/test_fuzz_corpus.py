"""Every input of the corpus is read or refused as documented. `make fuzz` also runs inputs that are derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from targets import CORPUS, TARGETS

INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_corpus(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_a_corpus() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)
