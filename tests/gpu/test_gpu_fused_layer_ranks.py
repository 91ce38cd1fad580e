"""The fused layer kernel on tensor-parallel ranks (`fused_layer_ranks.py`, `fused_engine_ranks.py`). Needs two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_fused_layers_of_ranks_equal_their_linears(num_ranks: int, uninterpreted: Callable[..., str]) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} CUDA devices")
    uninterpreted(Path(__file__).with_name("fused_layer_ranks.py"), str(num_ranks))


@pytest.mark.parametrize("steps", [["captured"], ["eager"], ["captured", "eager"]], ids="+".join)
def test_an_engine_decodes_with_fused_layers_on_two_ranks(steps: list[str], tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    uninterpreted(Path(__file__).with_name("fused_engine_ranks.py"), "cuda", tmp_path, *steps)
