from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "builder"))

import torch
from drive import Driven

from stoker.runtime.sampling.grammar_client import CompileProcess


@pytest.fixture(scope="session")
def model() -> Any:
    """The model of transformers with the weights of the tiny engine."""
    import tiny

    return tiny.model()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (9, 40, 1, 23, 33, 17)]


@pytest.fixture(scope="session")
def compiler(tiny_engine: Path) -> Iterator[CompileProcess]:
    """The compile process that most tests share."""
    yield from _compile_process(tiny_engine)


@pytest.fixture
def own_compiler(tiny_engine: Path) -> Iterator[CompileProcess]:
    """A compile process that a test may end."""
    yield from _compile_process(tiny_engine)


def _compile_process(engine: Path) -> Iterator[CompileProcess]:
    process = CompileProcess(engine, json.loads((engine / "config.json").read_text())["model"]["vocab_size"])
    yield process
    process.close()


@pytest.fixture
def drive(tiny_engine: Path, compiler: CompileProcess) -> Iterator[Callable[..., Driven]]:
    """Creates executors of the tiny engine, and checks at the end that they hold no sequences or blocks."""
    created: list[Driven] = []

    def create(**settings: Any) -> Driven:
        created.append(Driven(tiny_engine, compiler, **{"kv_cache_tokens": 2048} | settings))
        return created[-1]

    yield create
    for driven in created:
        driven.check_idle()
