"""Draft heads on two GPUs: the states that a stage forwards and the all-reduce, inside CUDA graphs. Needs two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kind", "shape", "cuda_graphs"),
    [
        ("pp2", "eagle3", "chain", "graphs"),
        ("pp2", "eagle3", "tree", "eager"),
        ("pp2", "eagle", "dynamic", "graphs"),
        ("tp2", "eagle3", "dynamic", "graphs"),
        ("tp2", "eagle", "chain", "graphs"),
        ("tp2", "medusa", "tree", "graphs"),
    ],
)
def test_tokens_are_those_of_plain_decoding(name: str, kind: str, shape: str, cuda_graphs: str, tmp_path: Path, tokenizer: Path) -> None:
    """Also that closing an executor leaves nothing about which PyTorch warns: groups, or threads that outlive their store."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("rank_draft_tokens.py")
    ran = subprocess.run(
        [sys.executable, str(script), name, kind, shape, cuda_graphs, str(tmp_path), str(tokenizer)],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-200:] + ran.stderr[-3000:]
    assert "process_group" not in ran.stderr and "TCPStore" not in ran.stderr and "HeartbeatMonitor" not in ran.stderr, ran.stderr[-3000:]
