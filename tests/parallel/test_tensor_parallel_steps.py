"""Steps of tensor-parallel ranks as on GPUs: captured steps sample greedily on every rank, from its own shard of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import CASES, POSITIONS, VOCAB
from rank_executors import generate, load
from test_data_parallel import prompts
from thread_ranks import ROWS, CalledSteps, Followers, count_unknown_ids, executor_of_threads, groups_of_threads

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.inputs import StepInputs
from stoker.runtime.worker.model_runner import ModelRunner

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


def executor_of_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_drafts: int = 0
) -> tuple[Executor, Followers, list[ModelRunner], list[str]]:
    """The results of `executor_of_threads`, and the names of the collectives that the leader calls from now on to share logits and ids.

    With `max_drafts` > 0, steps without prefills verify the drafts of requests.
    """
    groups = groups_of_threads(SIZE)
    called: list[str] = []
    for name in ("all_gather", "broadcast"):
        method = getattr(groups[0], name)
        monkeypatch.setattr(groups[0], name, lambda x, name=name, method=method: called.append(name) or method(x))
    worlds = [World(group.rank, SIZE, tensor=group, everyone=group) for group in groups]
    settings: dict[str, Any] = {"policy": "max_utilization"}
    if max_drafts:
        settings |= {"proposer": "request", "draft_tokens": max_drafts, "drafts_beside_prefill": False}
    executor, followers, runners = executor_of_threads(
        Engine.open(folder / "two"), worlds, lambda sizes: Scheduler(**settings | sizes), graphs=CalledSteps, max_drafts=max_drafts
    )
    return executor, followers, runners, called


def record_last_ids(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, list[int]]]:
    """Returns a list to which each step adds (whether it verified drafts, the newest id of each row after it)."""
    stored: list[tuple[bool, list[int]]] = []
    store = runner._store_last_ids

    def recorded(inputs: StepInputs, *arguments: Any, **named: Any) -> None:
        store(inputs, *arguments, **named)
        stored.append((inputs.starts is not None, runner.last_ids.tolist()))

    monkeypatch.setattr(runner, "_store_last_ids", recorded)
    return stored


def test_captured_greedy_steps_gather_no_logits_and_broadcast_no_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load(folder / "one")
    expected = generate(one, prompts(), 20)
    sampled = generate(one, prompts()[:5], 10, temperature=1.0, seed=5)
    executor, followers, _, called = executor_of_ranks(folder, monkeypatch)
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


def test_captured_greedy_steps_with_drafts_broadcast_only_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank samples from its shard, the leader verifies, and followers store the newest accepted ids."""
    texts = [prompt[-12:] for prompt in prompts()[:ROWS]]  # the cache holds all of them and their answers: each has a row of its own
    expected = generate(load(folder / "one"), texts, 20)
    drafts = [[(token + (i % 8 == 5)) % VOCAB for i, token in enumerate(tokens)] for tokens in expected[1:]]
    executor, followers, runners, called = executor_of_ranks(folder, monkeypatch, max_drafts=4)
    stored = [record_last_ids(runner, monkeypatch) for runner in runners]
    try:
        assert generate(executor, texts, 20, drafts=[[], *drafts]) == expected
    finally:
        followers.close()
    lengths = executor.scheduler.draft_length
    assert 20 < lengths.num_accepted < lengths.num_drafts - 10, "some drafts are rejected"
    assert set(called) == {"broadcast"} and called.count("broadcast") == sum(has_drafts for has_drafts, _ in stored[0]) < len(stored[0])
    assert stored[0] == stored[1] and sorted(stored[0][-1][1][:ROWS]) == sorted(tokens[-1] for tokens in expected)
    assert runners[0].graphs.replayed == runners[1].graphs.replayed  # type: ignore[union-attr]
