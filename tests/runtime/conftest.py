from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "builder"))

import torch
from drive import Driven


@pytest.fixture(scope="session")
def model() -> Any:
    """The model of transformers with the weights of the tiny engine."""
    import tiny

    return tiny.model()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (9, 40, 1, 23, 33, 17)]


@pytest.fixture
def drive(tiny_engine: Path) -> Iterator[Callable[..., Driven]]:
    """Creates executors of the tiny engine, and checks at the end that they hold no sequences or blocks."""
    created: list[Driven] = []

    def create(**settings: Any) -> Driven:
        created.append(Driven(tiny_engine, **{"kv_cache_tokens": 2048} | settings))
        return created[-1]

    yield create
    for driven in created:
        driven.check_idle()
