"""All-reduce + residual + norm as a layer does them, inside a CUDA graph: every way, beside NCCL with a separate kernel after it.

PYTHONPATH=src python benchmarks/allreduce.py --ranks 4,2 --json results.jsonl

Each way is first checked on random messages, replayed from a graph: right sums, the same bits on every rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from stoker.base.config import Mapping
from stoker.cli.bench.report import origin
from stoker.distributed import inbox, symmetric
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import join
from stoker.kernels import ops
from stoker.kernels.triton.all_reduce import check_inboxes, exchange

HIDDEN = 8192  # Llama-70B's stream
ROW_BYTES = 2 * HIDDEN
EPS = 1e-5
REPEATS = 20  # all-reduces in a graph: one is too short to time
REPLAYS = 30


class Message:
    """What the ranks of a group sum: their own x, and a residual that all have."""

    def __init__(self, rows: int, group: ProcessGroup) -> None:
        self.x, self.residual = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=group.device) for _ in range(2))
        self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=group.device)

    def norm(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return ops.norm(total, self.weight, None, EPS, "rms"), total

    def add_norm(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(total, self.residual.clone(), self.weight, None, EPS, "rms")


Way = Callable[[Message], tuple[Tensor, Tensor]]  # → (normed, stream)


def ways(group: SymmetricGroup, num_bytes: int) -> dict[str, Way]:
    """What is timed, by name. "stoker" is what a layer calls."""
    plain = ProcessGroup(group.inner, group.device)
    made: dict[str, Way] = {
        "nccl": lambda m: (m.x, plain.all_reduce(m.x)),
        "nccl + add + norm": lambda m: m.norm(plain.all_reduce(m.x) + m.residual),
        "nccl + add_norm": lambda m: ops.add_norm(plain.all_reduce(m.x), m.residual, m.weight, None, EPS, "rms"),
        "torch two-shot + add_norm": lambda m: ops.add_norm(group.all_reduce(m.x), m.residual, m.weight, None, EPS, "rms"),
        "stoker, norm left to the linear": lambda m: (m.x, ops.all_reduce(m.x, group, m.residual)),
        "stoker": lambda m: ops.all_reduce_norm(m.x, group, m.residual, m.weight, None, EPS, "rms"),
    }
    if num_bytes > inbox.MAX_BYTES:
        return {name: way for name, way in made.items() if "stoker" not in name}
    for name, is_two_shot in (("one-shot", False), ("two-shot", True)):
        made[f"{name} rows"] = partial(by_rows, group, is_two_shot)
        made[f"{name} pieces"] = partial(by_pieces, group, is_two_shot)
        made[f"{name} pieces, norm after"] = lambda m, way=made[f"{name} pieces"]: m.norm(way(m)[1])  # type: ignore[misc]
    return made


def by_rows(group: SymmetricGroup, is_two_shot: bool, message: Message) -> tuple[Tensor, Tensor]:
    assert group.inboxes is not None
    places = group.inboxes.get(ROW_BYTES, is_two_shot)
    assert places is not None
    return exchange(message.x, message.residual, places, message.weight, None, EPS, "rms")


def by_pieces(group: SymmetricGroup, is_two_shot: bool, message: Message) -> tuple[Tensor, Tensor]:
    assert group.inboxes is not None
    places = group.inboxes.get(inbox.UNIT_BYTES, is_two_shot)
    assert places is not None
    return message.x, exchange(message.x, message.residual, places)[1]


def captured(run: Callable[[], object], times: int = 1) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = [run() for _ in range(times)]
    torch.cuda.synchronize()
    return graph, found


def timed(run: Callable[[], object], group: ProcessGroup) -> float:
    """Microseconds of one of the graph's REPEATS, the median of REPLAYS; the slowest rank's."""
    graph, _ = captured(run, REPEATS)
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


def check(way: Way, group: SymmetricGroup, rows: int) -> str | None:
    """What is wrong with `way` on messages of `rows` rows; None: nothing."""
    plain = ProcessGroup(group.inner, group.device)
    message = Message(rows, group)
    graph, found = captured(lambda: way(message), 2)
    for _ in range(5):
        x, residual = torch.randn_like(message.x), torch.randn_like(message.x)
        plain.broadcast(residual)
        parts = plain.all_gather(x).unflatten(-1, (group.size, -1))
        wanted = parts.double().sum(-2) + residual.double()
        message.x.copy_(x)
        message.residual.copy_(residual)
        graph.replay()
        normed, stream = found[-1]
        scaled = (stream.double() * (stream.double().square().mean(-1, keepdim=True) + EPS).rsqrt()) if normed is not message.x else None
        same = plain.all_gather(stream).unflatten(-1, (group.size, -1))
        if not (same == same[..., :1, :]).all():
            return "ranks differ"
        if (stream - wanted).abs().max() > 0.1:
            return f"off by {float((stream - wanted).abs().max())}"
        if scaled is not None and (normed - scaled).abs().max() > 0.1:
            return f"the norm is off by {float((normed - scaled).abs().max())}"
    return None


def measure(group: SymmetricGroup, kibs: list[int], tell: Callable[[dict[str, Any]], None]) -> None:
    check_inboxes(group)
    if group.inboxes is None:
        tell({"ranks": group.size, "wrong": "inboxes do not work here; see the log"})
        return
    every, usual = ways(group, ROW_BYTES), group.max_bytes
    for name in [name for name in every if "rows" in name or name.endswith("pieces") or name.startswith("stoker")]:
        for rows in (1, 13, 32):
            wrong = check(every[name], group, rows)
            if -group.smallest(-(wrong is not None)):
                tell({"ranks": group.size, "way": name, "rows": rows, "wrong": wrong or "on another rank"})
    for kib in kibs:
        message = Message(kib * 1024 // ROW_BYTES, group)
        group.max_bytes = symmetric.BUFFER_BYTES
        every = ways(group, kib * 1024)
        row: dict[str, Any] = {"ranks": group.size, "kib": kib}
        for name, way in every.items():
            row[name] = round(timed(partial(way, message), group), 2)
        if "stoker" in row:
            row["ratio"] = round(row["stoker"] / row["nccl + add_norm"], 3)
        tell(row)
    group.max_bytes = usual


def rank_main(rank: int, sizes: list[int], port: int, args: argparse.Namespace) -> None:
    started, device = time.monotonic(), torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = join(store, rank, Mapping(tensor_parallel=sizes[0]), device)
    about = {"what": "all-reduce, µs", **origin(device="cuda")}

    def tell(row: dict[str, Any]) -> None:
        if rank == 0:
            line = json.dumps(about | row | {"after_s": round(time.monotonic() - started, 1)}, ensure_ascii=False)
            print(line, flush=True)
            if args.json:
                with Path(args.json).open("a") as file:
                    file.write(line + "\n")

    with torch.inference_mode():
        for size in sizes:
            if size == sizes[0]:
                group = world.tensor
            else:  # all groups of that many neighbours at once; each rank makes every one, and belongs to one
                made = [dist.new_group(list(range(first, first + size))) for first in range(0, sizes[0] - size + 1, size)]
                if rank // size >= len(made):
                    continue
                group = SymmetricGroup(made[rank // size], device)
            assert isinstance(group, SymmetricGroup)
            measure(group, [int(kib) for kib in args.kib.split(",")], tell)
    world.everyone.smallest(0)
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default=str(torch.cuda.device_count()), help="numbers of GPUs, the largest first: 4,2")
    parser.add_argument("--kib", default="16,32,64,128,256,512,1024,4096,16384", help="message sizes; a row of 8192 bfloat16 is 16")
    parser.add_argument("--json", help="a line for each size is added to this file")
    args = parser.parse_args()
    sizes = [int(size) for size in args.ranks.split(",")]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, (sizes, store.port, args), sizes[0])


if __name__ == "__main__":
    main()
