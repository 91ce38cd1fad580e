"""The memory budget of a device, and the steps with which it is measured."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.distributed.world import ALONE_WORLD
from stoker.engine.reader import Engine
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.load import load_executor
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.draft_engine import EngineDrafter
from stoker.runtime.worker.memory import MemoryBudget, num_kv_blocks
from stoker.runtime.worker.rank import largest_steps, load_rank

GIB = 1 << 30


def test_the_rows_of_the_table_sum_to_the_total() -> None:
    budget = MemoryBudget(
        "cuda:0", total=140 * GIB, weights=15 * GIB, free=120 * GIB, activations=2 * GIB, graphs=GIB, kv=100 * GIB, num_blocks=100,
        tokens_per_block=64,
    )  # fmt: skip
    lines = {line[2:14].strip(): float(line.split("GiB")[0].split()[-1]) for line in budget.table().splitlines()[1:]}
    assert lines == {
        "total": 140, "others": 5, "weights": 15, "activations": 2, "graphs": 1, "KV cache": 100, "left over": 17,
    }  # fmt: skip
    assert sum(size for name, size in lines.items() if name != "total") == lines["total"]


def test_the_table_states_that_activations_are_not_measured() -> None:
    budget = MemoryBudget("cpu", 8 * GIB, GIB, 6 * GIB, None, 0, 3 * GIB, 10, 16)
    assert "not measured" in budget.table() and budget.left_over == 3 * GIB


def test_the_largest_steps_are_at_the_limits() -> None:
    steps = largest_steps(Capacity(max_batch_size=8, max_num_sequences=8, max_num_tokens=100, max_seq_len=64))
    assert {(shape.tokens, shape.rows, bounds.num_decodes) for shape, bounds in steps} == {(8, 8, 8), (100, 8, 7), (100, 8, 0)}
    assert largest_steps(Capacity(8, 8, 4, 64))[-1][0].tokens == 8  # fewer tokens than rows: decodes alone


@pytest.mark.parametrize("with_drafter", [False, True])
@torch.inference_mode()
def test_dummy_steps_at_the_limits_do_not_change_the_cache(tiny_engine: Path, with_drafter: bool) -> None:
    """A draft engine computes all its drafts, so that the memory of its activations is measured, too."""
    engine = Engine.open(tiny_engine)
    config = RuntimeConfig(max_batch_size=4, max_num_tokens=64, draft_tokens=3, speculate=str(tiny_engine) if with_drafter else "none")
    loaded = load_rank(engine, config, torch.device("cpu"), ALONE_WORLD)
    runner = loaded.runner(8)
    caches, computed = list(runner.caches), list[int]()
    if (drafting := runner.draft_runner) is not None:
        assert isinstance(drafting.drafter, EngineDrafter)
        caches += drafting.drafter.caches
        model = drafting.drafter.model
        drafting.drafter.model = lambda batch, caches: (computed.append(batch.num_tokens), model(batch, caches))[1]  # type: ignore[assignment]
        drafting.drafter.model.config = model.config  # type: ignore[attr-defined]
    for cache in caches:
        cache.keys.fill_(3.0)
    runner.last_ids.fill_(7)
    rows = runner.inputs.num_rows
    for shape, bounds in largest_steps(loaded.capacity, speculates=with_drafter):
        runner.run_dummy_step_with_sampling(shape, bounds)
    ids = runner.last_ids.view(-1, rows + 1)
    assert set(ids[:, :rows].flatten().tolist()) == {7} and len(ids) == (4 if with_drafter else 1)
    assert all(bool((cache.keys == 3.0).all()) for cache in caches)
    assert computed == [128, 64, 64] if with_drafter else not computed  # the tokens of the step and the newest ones; then further drafts


def test_the_cache_gets_a_fraction_of_the_memory_after_the_largest_step() -> None:
    """Not a fraction of the memory that is free before the step."""
    limits = Limits(max_batch_size=64, max_input_len=4096, max_output_len=4096)
    blocks = [num_kv_blocks(free, GIB // 64, limits, RuntimeConfig(), "cuda") for free in (10 * GIB, 8 * GIB)]
    assert blocks == [576, 460]


def test_the_budget_is_logged_at_the_start(tiny_engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stoker").propagate = True
    with caplog.at_level(logging.INFO, logger="stoker"):
        executor = load_executor(tiny_engine, RuntimeConfig(kv_cache_tokens=256), SynchronousMailbox)
    logged = "\n".join(record.getMessage() for record in caplog.records)
    for name in ("weights", "activations", "graphs", "KV cache", "left over"):
        assert name in logged
    result = run_batch(executor, random_requests(2, 4, 4, executor.info.vocab_size), 4)
    assert result.num_requests == 2
