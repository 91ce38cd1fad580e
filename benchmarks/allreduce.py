"""All-reduce + residual + norm as a layer does them, inside a CUDA graph: NCCL with a separate add and norm, against symmetric memory.

PYTHONPATH=src python benchmarks/allreduce.py --ranks 4 --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from stoker.base.config import Mapping
from stoker.distributed import symmetric
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import join
from stoker.kernels import ops

HIDDEN = 8192  # Llama-70B's stream
REPEATS = 20  # all-reduces in a graph: one is too short to time
REPLAYS = 50


def timed(run: Callable[[], None], group: ProcessGroup) -> float:
    """Microseconds of one of the graph's REPEATS, the median of REPLAYS; the slowest rank's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                run()
        times = []
        for _ in range(REPLAYS):
            group.smallest(0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return -group.smallest(-round(statistics.median(times) * 1000)) / 1000


def cases(group: SymmetricGroup, x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Callable[[], None]]:
    """What is timed, by name. `x` is summed over and over: zeros stay zeros."""
    plain = ProcessGroup(group.inner, group.device)
    num_bytes = x.numel() * x.element_size()
    made: dict[str, Callable[[], None]] = {
        "nccl": lambda: void(plain.all_reduce(x)),
        "nccl + add + norm": lambda: void(ops.norm(plain.all_reduce(x) + residual, weight, None, 1e-5, "rms")),
        "stoker": lambda: void(group.all_reduce(x)),
        "stoker + norm": lambda: void(ops.norm(group.all_reduce(x), weight, None, 1e-5, "rms")),
    }
    for name, limit in (("one-shot", num_bytes), ("two-shot", 0)):
        if symmetric.method(num_bytes, x.dtype, group.size, limit) == name:
            made[name] = lambda limit=limit: void(forced(group, limit).all_reduce(x))  # type: ignore[misc]
    return made


def forced(group: SymmetricGroup, limit: int) -> SymmetricGroup:
    group._one_shot_bytes = limit
    return group


def void(_: Tensor) -> None:
    return None


def check(group: SymmetricGroup) -> None:
    """Every method sums, and every rank gets the same bits."""
    limit = group._one_shot_bytes
    for one_shot_bytes in (0, symmetric.MAX_BYTES):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(64, HIDDEN, device=group.device, dtype=dtype)
            wanted = ProcessGroup(group.inner, group.device).all_gather(x).unflatten(-1, (group.size, -1)).double().sum(-2)
            found = forced(group, one_shot_bytes).all_reduce(x.clone())
            assert (found - wanted).abs().max() < 0.1
            everyone = ProcessGroup(group.inner, group.device).all_gather(found).unflatten(-1, (group.size, -1))
            assert (everyone == everyone[:, :1]).all()
    group._one_shot_bytes = limit


def rank_main(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = join(store, rank, Mapping(tensor_parallel=size), device)
    group = world.tensor
    assert isinstance(group, SymmetricGroup)
    check(group)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for kib in map(int, args.kib.split(",")):
            shape = (kib * 1024 // 2 // HIDDEN, HIDDEN)
            x, residual = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
            limit = group._one_shot_bytes
            row: dict[str, Any] = {"kib": kib}
            for name, run in cases(group, x, residual, weight).items():
                group._one_shot_bytes = limit
                row[name] = round(timed(run, group), 2)
            group._one_shot_bytes = limit
            row["ratio"] = round(row["stoker + norm"] / row["nccl + add + norm"], 3)
            rows.append(row)
            if rank == 0:
                print(row, flush=True)
    if rank == 0 and args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"device": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__, "commit": commit}
        Path(args.json).write_text(json.dumps(about | {"microseconds": rows}, indent=1))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--kib", default="16,32,64,128,256,512", help="message sizes; a row of 8192 bfloat16 is 16")
    parser.add_argument("--json")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, (args.ranks, store.port, args), args.ranks)


if __name__ == "__main__":
    main()
