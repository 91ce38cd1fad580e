"""An engine on two nodes of this host, with NCCL as between hosts: no peer-to-peer access and no shared memory. Needs two GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "server"))
from free_ports import free_port

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")
BETWEEN_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def completions(engine: Path, folder: Path, num_nodes: int, *options: str) -> str:
    """The greedy completion of a prompt by an engine on this number of nodes."""
    rendezvous = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, **BETWEEN_HOSTS, "STOKER_CLUSTER_TOKEN": "t" * 32}
    logs = [folder / f"{num_nodes}-node{rank}.log" for rank in range(num_nodes)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "stoker", "serve", str(engine), "--port", "0", "--devices", "0,1", *options]
        if num_nodes > 1:
            command += ["--nnodes", str(num_nodes), "--node-rank", str(rank), "--rendezvous", rendezvous]
        with log.open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment))
    try:
        deadline = time.monotonic() + 100
        while (served := re.search(r"is served at (http://127\.0\.0\.1:\d+)", logs[0].read_text())) is None:
            assert time.monotonic() < deadline and processes[0].poll() is None, "\n".join(log.read_text() for log in logs)
            time.sleep(0.1)
        body = json.dumps({"model": "engine", "prompt": "the quick brown", "max_tokens": 32, "temperature": 0, "ignore_eos": True})
        request = urllib.request.Request(f"{served[1]}/v1/completions", body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    finally:
        processes[0].terminate()
        for process in processes:
            process.wait(60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mapping", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}], ids=["stages", "tensor"])
def test_tokens_equal_those_of_one_node(mapping: dict[str, int], tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
    import tiny

    from stoker.base.config import Limits, Mapping
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    model = tiny.model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    limits = Limits(max_batch_size=8, max_input_len=128, max_output_len=64, max_num_tokens=256)
    config = BuildConfig(device="cuda", dtype="bfloat16", limits=limits, mapping=Mapping(**mapping))
    engine = build(tiny.save(model, tmp_path / "checkpoint"), tmp_path / "engine", config, verify="none").path
    same_kernels = () if "pipeline_parallel" in mapping else ("--no-custom-all-reduce",)
    assert completions(engine, tmp_path, 2, *same_kernels) == completions(engine, tmp_path, 1, *same_kernels)
