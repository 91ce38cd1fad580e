"""Data-parallel attention on two GPUs: NCCL inside CUDA graphs of one shape, ids broadcast to the other rank. Needs two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")


@pytest.mark.parametrize("cuda_graphs", ["graphs", "eager"])
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
def test_tokens_under_load_equal_those_alone(
    name: str, cuda_graphs: str, tmp_path: Path, tokenizer: Path, uninterpreted: Callable[..., str]
) -> None:
    uninterpreted(Path(__file__).with_name("data_parallel_tokens.py"), name, "cuda", cuda_graphs, tmp_path, tokenizer)
