"""Kernels run in Triton's interpreter: TRITON_INTERPRET is read when a kernel's module is first imported, so it is set here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).with_name("emulator")))

import interpreter
import pytest
import torch

interpreter.install()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher allocates holds NaN until a kernel writes it."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
