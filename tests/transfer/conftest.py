from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("builder", "transfer", "router", "server", "frontend"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from pairs import SECRET, Pair  # noqa: E402


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", SECRET)


@pytest.fixture
def pair() -> Iterator[type[Pair]]:
    """Creates pairs of executors, and checks at the end that neither holds a block."""
    created: list[Pair] = []

    class Checked(Pair):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)  # type: ignore[arg-type]
            created.append(self)

    yield Checked
    for each in created:
        each.close()
