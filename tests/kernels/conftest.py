"""Kernels run in Triton's interpreter here, which a kernel chooses when its module is first imported. Only this area imports them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import interpreter
import pytest
import torch

interpreter.install()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates holds NaN until a kernel writes it."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
