"""Tests that need a CUDA device: `python -m pytest tests/gpu`, not in one process with tests/kernels, which sets TRITON_INTERPRET."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # the float64 oracles

HAS_DEVICE = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not HAS_DEVICE:
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
