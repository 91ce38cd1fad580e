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
    """transformers' own model with the tiny engine's weights."""
    import tiny

    return tiny.model()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (9, 40, 1, 23, 33, 17)]


@pytest.fixture
def drive(tiny_engine: Path) -> Iterator[Callable[..., Driven]]:
    """Makes executors of the tiny engine; none may leave anything behind."""
    made: list[Driven] = []

    def make(**settings: Any) -> Driven:
        made.append(Driven(tiny_engine, **{"kv_cache_tokens": 2048} | settings))
        return made[-1]

    yield make
    for driven in made:
        driven.check_nothing_left()
