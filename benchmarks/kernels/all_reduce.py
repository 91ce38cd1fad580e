"""Measures all-reduce + residual + norm in a CUDA graph, as layers call them: every method, and NCCL with separate kernels after it.

PYTHONPATH=src python benchmarks/kernels/all_reduce.py --ranks 4,2 --json results.jsonl

Each method is first checked with random messages that a graph replays: correct sums, and the same bits on every rank.
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
from stoker.cli.benchmark.results import provenance
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import join
from stoker.kernels import ops
from stoker.kernels.triton.all_reduce import check_inboxes, sum_through_inbox

HIDDEN = 8192  # hidden size of Llama-70B
ROW_BYTES = 2 * HIDDEN
EPS = 1e-5
REPEATS = 20  # all-reduces per graph, because one is too short to be timed
REPLAYS = 30


class Message:
    """The operands: an `x` per rank, whose sum is computed, and a residual that is equal on all ranks."""

    def __init__(self, rows: int, group: ProcessGroup) -> None:
        self.x, self.residual = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=group.device) for _ in range(2))
        self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=group.device)

    def norm(self, total: Tensor) -> Tensor:
        return ops.norm(total, self.weight, None, EPS, "rms")


# → (residual stream, its norm; None: the next linear computes the norm)
Method = Callable[[Message], tuple[Tensor, Tensor | None]]
STOKER, NCCL = "stoker + norm", "nccl + add + norm"  # the method of layers, and the baseline


def methods_of(group: SymmetricGroup, num_bytes: int) -> dict[str, Method]:
    """The methods to time, by name."""
    plain = ProcessGroup(group.inner, group.device)
    methods: dict[str, Method] = {
        "nccl": lambda m: (plain.all_reduce(m.x), None),
        NCCL: normed(lambda m: plain.all_reduce(m.x) + m.residual),
        "torch two-shot + add + norm": normed(lambda m: group.all_reduce(m.x) + m.residual),
    }
    inboxes = group.inboxes
    if inboxes is None or num_bytes > inboxes.max_bytes:
        return methods
    methods["stoker"] = lambda m: (ops.all_reduce(m.x, group, m.residual), None)
    methods[STOKER] = normed(lambda m: ops.all_reduce(m.x, group, m.residual))
    for name, inbox in zip(("one-shot", "two-shot"), inboxes.all_reduces, strict=False):
        methods[name] = lambda m, inbox=inbox: (sum_through_inbox(m.x, m.residual, inbox), None)  # type: ignore[misc]
    return methods


def normed(total: Callable[[Message], Tensor]) -> Method:
    """`total` followed by a separate norm kernel."""

    def method(message: Message) -> tuple[Tensor, Tensor]:
        stream = total(message)
        return stream, message.norm(stream)

    return method


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
    """Microseconds per call: the median over REPLAYS of a graph with REPEATS calls, of the slowest rank."""
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


def check(method: Method, group: SymmetricGroup, rows: int) -> str | None:
    """The error of a method with messages of `rows` rows; None when it is correct."""
    plain = ProcessGroup(group.inner, group.device)
    message = Message(rows, group)
    graph, found = captured(lambda: method(message), 2)
    for _ in range(5):
        x, residual = torch.randn_like(message.x), torch.randn_like(message.x)
        plain.broadcast(residual)
        parts = plain.all_gather(x).unflatten(-1, (group.size, -1))
        expected = parts.double().sum(-2) + residual.double()
        message.x.copy_(x)
        message.residual.copy_(residual)
        graph.replay()
        stream, scaled = found[-1]
        same = plain.all_gather(stream).unflatten(-1, (group.size, -1))
        if not (same == same[..., :1, :]).all():
            return "ranks differ"
        if (stream - expected).abs().max() > 0.1:
            return f"off by {float((stream - expected).abs().max())}"
        expected = stream.double() * (stream.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
        if scaled is not None and (scaled - expected).abs().max() > 0.1:
            return f"the norm is off by {float((scaled - expected).abs().max())}"
    return None


def measure(group: SymmetricGroup, kibs: list[int], report: Callable[[dict[str, Any]], None]) -> None:
    check_inboxes(group)
    if group.inboxes is None:
        report({"ranks": group.size, "error": "inboxes do not work here; see the log"})
        return
    methods = methods_of(group, ROW_BYTES)
    for name in [name for name in (STOKER, "one-shot", "two-shot") if name in methods]:
        for rows in (1, 13, group.inboxes.max_bytes // ROW_BYTES):
            error = check(methods[name], group, rows)
            if -group.smallest(-(error is not None)):
                report({"ranks": group.size, "method": name, "rows": rows, "error": error or "on another rank"})
    for kib in kibs:
        message = Message(kib * 1024 // ROW_BYTES, group)
        methods = methods_of(group, kib * 1024)
        row: dict[str, Any] = {"ranks": group.size, "kib": kib}
        for name, method in methods.items():
            row[name] = round(timed(partial(method, message), group), 2)
        if STOKER in row:
            row["ratio"] = round(row[STOKER] / row[NCCL], 3)
        report(row)


def rank_main(rank: int, sizes: list[int], port: int, args: argparse.Namespace) -> None:
    started, device = time.monotonic(), torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = join(store, rank, Mapping(tensor_parallel=sizes[0]), device)
    about = {"what": "all-reduce, µs", **provenance(device="cuda")}

    def report(row: dict[str, Any]) -> None:
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
            else:  # all groups of `size` adjacent ranks at once; every rank creates all groups and belongs to one
                groups = [dist.new_group(list(range(first, first + size))) for first in range(0, sizes[0] - size + 1, size)]
                if rank // size >= len(groups):
                    continue
                group = SymmetricGroup(groups[rank // size], device)
            assert isinstance(group, SymmetricGroup)
            measure(group, [int(kib) for kib in args.kib.split(",")], report)
    world.everyone.smallest(0)
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default=str(torch.cuda.device_count()), help="numbers of GPUs, largest first, such as 4,2")
    parser.add_argument(
        "--kib", default="16,32,64,128,256,512,1024,2048,4096,8192,16384", help="message sizes; a row of 8192 bfloat16 values has 16 KiB"
    )
    parser.add_argument("--json", help="append a line per size to this file")
    args = parser.parse_args()
    sizes = [int(size) for size in args.ranks.split(",")]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, (sizes, store.port, args), sizes[0])


if __name__ == "__main__":
    main()
