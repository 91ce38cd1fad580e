"""Times prompt steps of two or more tensor-parallel ranks as a whole and in halves, whose sums over the ranks overlap with products.

    PYTHONPATH=src python benchmarks/overlapped_steps.py --model llama-3.1-70b --quantization FP8_KV --tokens 8192,4096 --json results.json

Weights are random. A step has prompts of 1,024 tokens. Three variants take turns: the step as a whole, halves whose summands are copied
between two ranks (`distributed/peer_copies.py`), and halves summed by NCCL. For each, the result has the median time of the slowest rank on
the device and on the host until the last kernel was launched, and the difference of the hidden states before the head from those of the
whole step. The program fails if both kinds of halves differ in any bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import World, join
from stoker.engine.reader import Engine
from stoker.layers import overlapped_layers
from stoker.layers.decoder import Decoder
from stoker.runtime.worker.memory import make_caches
from stoker.runtime.worker.rank import load_rank

HERE = Path(__file__).parent
PROMPT = 1024
WHOLE, COPIES, NCCL = "whole", "halves, copies", "halves, NCCL"


def batch_of(num_tokens: int, block_size: int, vocab_size: int, device: torch.device) -> ForwardBatch:
    """A step of prompts with PROMPT tokens each; the last one has the rest."""
    lengths = [min(PROMPT, num_tokens - start) for start in range(0, num_tokens, PROMPT)]
    per_row = -(-PROMPT // block_size)
    index = torch.arange(num_tokens)
    rows, positions = index // PROMPT, index % PROMPT
    tables = torch.arange(len(lengths) * per_row).view(-1, per_row)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    starts = torch.tensor([0, *lengths]).cumsum(0)
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    values = (token_ids, positions, slots, starts, torch.tensor(lengths), tables)
    return ForwardBatch(*(value.to(device, torch.int32) for value in values), 0, max(lengths), max(lengths))


class Steps:
    """One rank: its model, its group, and the variants of a step."""

    def __init__(self, engine: Engine, world: World, device: torch.device, num_tokens: int) -> None:
        config = engine.config
        overlapped_layers.MIN_WORK = 0  # small models, too
        self.loaded = load_rank(engine, RuntimeConfig(max_num_tokens=num_tokens), device, world)
        self.model: Decoder = self.loaded.model
        self.size, self.vocab_size = config.limits.tokens_per_block, config.model.vocab_size
        blocks = (-(-num_tokens // PROMPT)) * (-(-PROMPT // self.size))
        tensor = config.mapping.tensor_parallel
        self.caches: list[KVCache] = make_caches(config.model, blocks, self.size, engine.kv_dtype, device, None, tensor)
        self.model.complete_caches(self.caches)
        assert isinstance(world.tensor, SymmetricGroup) and self.model.overlapped_layers is not None
        self.group, self.device = world.tensor, device
        self.variants = [WHOLE, COPIES, NCCL] if world.tensor._copies is not None else [WHOLE, NCCL]
        self.layers, self.copies = self.model.overlapped_layers, world.tensor._copies
        self.states: Tensor | None = None
        self.model.observe_layers = self._observe

    def _observe(self, number: int, x: Tensor) -> None:
        if number == len(self.model.layers):
            self.states = x

    @contextmanager
    def using(self, variant: str) -> Iterator[None]:
        """Steps of this variant."""
        self.model.overlapped_layers = None if variant == WHOLE else self.layers
        self.group._copies = self.copies if variant == COPIES else None
        yield
        self.model.overlapped_layers, self.group._copies = self.layers, self.copies

    def run(self, variant: str, batch: ForwardBatch) -> Tensor:
        """The hidden states after the last layer."""
        with self.using(variant):
            self.model(batch, self.caches)
        assert self.states is not None
        return self.states

    def check(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """The relative difference of hidden states in halves and as a whole. Raises AssertionError if copies and NCCL differ.

        Before each step, some ranks are delayed, so that they run at different times.
        """
        batch, delay = batch_of(num_tokens, self.size, self.vocab_size, self.device), torch.Generator().manual_seed(self.group.rank)
        assert self.layers.supports(batch, self.model._row_bytes), f"steps of {num_tokens} tokens are not computed in halves"
        whole, nccl = self.run(WHOLE, batch).float(), self.run(NCCL, batch).clone()
        difference = (nccl.float() - whole).norm() / whole.norm()
        found = {"relative_difference": round(difference.item(), 6), "finite": bool(whole.isfinite().all())}
        for _ in range(repeats if COPIES in self.variants else 0):
            torch.cuda._sleep(int(torch.randint(10_000_000, (), generator=delay)))
            assert torch.equal(self.run(COPIES, batch), nccl), "halves that are copied differ from those of NCCL"
        everywhere = self.group.gather_rows(nccl).unflatten(0, (self.group.size, -1))
        assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere)), "the residual stream differs between ranks"
        return found

    def time(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """Milliseconds of each variant: the slowest rank on the device, and the host until the last launch."""
        batch = batch_of(num_tokens, self.size, self.vocab_size, self.device)
        device_ms: dict[str, list[float]] = {variant: [] for variant in self.variants}
        host_ms: dict[str, list[float]] = {variant: [] for variant in self.variants}
        for _ in range(repeats):
            for variant in self.variants:
                self.group.smallest(0)
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                started = time.perf_counter()
                self.run(variant, batch)
                host_ms[variant].append((time.perf_counter() - started) * 1e3)
                end.record()
                end.synchronize()
                device_ms[variant].append(-self.group.smallest(-round(begin.elapsed_time(end) * 1e3)) / 1e3)
        return {
            variant: {
                "ms": round(statistics.median(device_ms[variant]), 2),
                "min_ms": round(min(device_ms[variant]), 2),
                "launch_ms": round(statistics.median(host_ms[variant]), 2),
            }
            for variant in self.variants
        }


def rank_main(rank: int, port: int, folder: str, args: argparse.Namespace) -> None:
    device, sizes = torch.device("cuda", rank), [int(size) for size in args.tokens.split(",")]
    torch.cuda.set_device(device)
    engine = Engine.open(folder)
    world = join(dist.TCPStore("127.0.0.1", port, is_master=False), rank, engine.config.mapping, device)
    results: dict[str, Any] = {**provenance(Path(folder), "cuda"), "ranks": world.size, "steps": []} if rank == 0 else {}
    with torch.inference_mode():
        steps = Steps(engine, world, device, max(sizes))
        for size in sizes:
            row: dict[str, Any] = {"tokens": size, **steps.check(size, args.checks), **steps.time(size, args.repeats)}
            if rank == 0:
                print(row, flush=True)
                results["steps"].append(row)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    world.everyone.smallest(0)
    world.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-70b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--quantization", default="", help="a recipe; empty: bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="8192,4096", help="sizes of steps")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each variant")
    parser.add_argument("--checks", type=int, default=4, help="steps whose values are compared with those of NCCL")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args(arguments)
    named = HERE / "models" / args.model
    model = named if named.is_dir() else Path(args.model)
    limits = Limits(max_batch_size=64, max_input_len=2048, max_output_len=64, max_num_tokens=max(map(int, args.tokens.split(","))))
    with tempfile.TemporaryDirectory() as folder:
        config = BuildConfig(
            dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=args.quantization or None,
            mapping=Mapping(tensor_parallel=args.ranks),
        )  # fmt: skip
        engine = build(model, Path(folder, "engine"), config, verify="none")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        multiprocessing.spawn(rank_main, (store.port, str(engine.path), args), args.ranks)


if __name__ == "__main__":
    main()
