"""Rank processes that run jobs together: every rank runs the same steps, as tests/parity does with one rank."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import BLOCK, NUM_SLOTS, Harness, Sequence, generate_in_batch, prefill_logits
from torch import Tensor

from stoker.base.config import Mapping
from stoker.base.nodes import leader
from stoker.core.forward_batch import ForwardBatch
from stoker.distributed.world import World, join
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache
from stoker.runtime.worker.memory import make_caches

CPU = torch.device("cpu")
LIMIT_S = 500.0  # of all jobs, on a busy machine


class RankHarness(Harness):
    """The shard of a rank. Each rank makes the same decisions from the same logits."""

    def __init__(self, engine: Path, num_positions: int, world: World) -> None:
        self.world = world
        super().__init__(engine, num_positions)

    def load(self, engine: Engine, num_positions: int, num_blocks: int) -> None:
        world, mapping = self.world, engine.config.mapping
        engine.check_world(world.size)
        self.model = Decoder(self.config, engine.loader(world.rank, CPU, world.tensor), num_positions, world.stage)
        layers = world.stage.layers(self.config.num_layers)
        states = StateCache(self.config, layers, mapping.tensor_parallel, NUM_SLOTS, self.model.dtype, CPU)
        self.caches = make_caches(self.config, num_blocks, BLOCK, engine.kv_dtype, CPU, layers, mapping.tensor_parallel, states)
        self.model.complete_caches(self.caches)
        self.leader = leader(mapping)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The logits of the last stage, on every rank."""
        logits = super().forward(batch).contiguous()
        if self.world.stage.num_stages == 1:
            return logits
        if not self.world.stage.is_last:
            logits = torch.empty(batch.num_tokens, self.config.vocab_size, dtype=self.model.dtype)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.leader, 0
        self.world.everyone.inner.broadcast([logits], options).wait()  # type: ignore[attr-defined]
        return logits


@dataclass
class Job:
    """Greedy tokens after `prompt` in a batch with others, chunked, preempted and with reused blocks; with one rank, also full prefills."""

    name: str
    engine: str
    mapping: Mapping
    first: int  # the process that is rank 0 of this job
    positions: int
    prompt: list[int]
    strangers: list[list[int]]
    num_new: int

    def run(self, world: World) -> dict[str, Any]:
        harness = RankHarness(Path(self.engine), self.positions, world)
        main = generate_in_batch(harness, self.prompt, self.strangers, self.num_new)
        again: Sequence | None = None
        if not harness.config.requires_whole_prompt and not harness.config.has_state:
            again = harness.start([*self.prompt[:18], 5, 6, 7], share=main)
            assert again.computed == BLOCK
            harness.step([(again, 5)])
        result = {"tokens": main.tokens, "again": again.tokens if again else [], "logits": logits_of(main)}
        if world.size == 1:
            result["alone"] = prefill_logits(harness, main.tokens[:-1])
            if again is not None:
                result["again logits"], result["again alone"] = logits_of(again), prefill_logits(harness, again.tokens[:-1])[BLOCK:]
        return result


def logits_of(sequence: Sequence) -> Tensor:
    return torch.stack([sequence.logits[i] for i in sorted(sequence.logits)])


def rank_main(process: int, port: int, folder: str, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    out: dict[str, Any] = {}
    jobs = [job for job in jobs if 0 <= process - job.first < job.mapping.world_size]
    ranks = {job.mapping: process - job.first for job in jobs}
    # By repr, because str leaves out expert parallelism: ranks of two worlds would read each other's addresses, and wait forever.
    worlds = {mapping: join(dist.PrefixStore(repr(mapping), store), rank, mapping, CPU) for mapping, rank in ranks.items()}
    for job in jobs:
        try:
            result = job.run(worlds[job.mapping])
            if ranks[job.mapping] == leader(job.mapping):
                out[job.name] = result
        except Exception:
            out[job.name] = {"error": traceback.format_exc()}
            break
    torch.save(out, f"{folder}/{process}.pt")


def run_jobs(jobs: list[Job], size: int, folder: Path) -> dict[str, Any]:
    """The results of the leaders by job."""
    context = multiprocessing.get_context("forkserver")  # the ranks fork from a process that has imported torch
    context.set_forkserver_preload(["torch.distributed", "stoker.engine.reader", "stoker.layers.decoder", "stoker.runtime.worker.memory"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=rank_main, args=(i, store.port, str(folder), jobs), daemon=True) for i in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    for process in processes:
        if process.is_alive():
            process.kill()
    found: dict[str, Any] = {}
    for i in range(size):
        if (folder / f"{i}.pt").exists():
            for name, result in torch.load(folder / f"{i}.pt").items():
                if "error" in result or name not in found:
                    found[name] = result
    return found
