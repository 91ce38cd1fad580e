"""All-reduces between GPUs (`all_reduce_ranks.py`). Needs two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sums_over_ranks(num_ranks: int, uninterpreted: Callable[..., str]) -> None:
    """Through inboxes in graphs, and with the results of experts."""
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} CUDA devices")
    uninterpreted(Path(__file__).with_name("all_reduce_ranks.py"), str(num_ranks))
