"""Steps of tensor-parallel ranks as on GPUs: captured steps sample greedily on every rank, from its own shard of the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, POSITIONS
from rank_executors import generate, load
from test_data_parallel import prompts
from thread_ranks import ROWS, CalledSteps, count_unknown_ids, executor_of_threads, groups_of_threads

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.runtime.schedule.scheduler import Scheduler

SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    out = tmp_path_factory.mktemp("engines")
    CASES["LlamaForCausalLM", "plain"]().save(out / "hf")
    limits = Limits(
        max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=ROWS, tokens_per_block=16
    )
    for name, mapping in (("one", Mapping()), ("two", Mapping(tensor_parallel=SIZE))):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        build(out / "hf", out / name, config, verify="none")
    return out


def test_captured_greedy_steps_gather_no_logits_and_broadcast_no_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load(folder / "one")
    expected = generate(one, prompts(), 20)
    sampled = generate(one, prompts()[:5], 10, temperature=1.0, seed=5)
    groups = groups_of_threads(SIZE)
    called: list[str] = []
    for name in ("all_gather", "broadcast"):
        method = getattr(groups[0], name)
        monkeypatch.setattr(groups[0], name, lambda x, name=name, method=method: called.append(name) or method(x))
    worlds = [World(group.rank, SIZE, tensor=group, everyone=group) for group in groups]
    executor, followers, _ = executor_of_threads(
        Engine.open(folder / "two"), worlds, lambda sizes: Scheduler(policy="max_utilization", **sizes), graphs=CalledSteps
    )
    num_unknown = count_unknown_ids(executor)
    try:
        assert generate(executor, prompts(), 20) == expected
        assert not called and num_unknown() > 50 and executor.scheduler.num_preemptions > 0
        assert generate(executor, prompts()[:5], 10, temperature=1.0, seed=5) == sampled
        assert set(called) == {"all_gather", "broadcast"}
        assert generate(executor, prompts()[:2], 6, logprobs=1) == [tokens[:6] for tokens in expected[:2]], "a step without a graph"
        assert generate(executor, prompts(), 20) == expected, "greedy steps after those that draw"
    finally:
        followers.close()
