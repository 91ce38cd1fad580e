"""Steps of data-parallel ranks as on GPUs: padded to captured shapes, and planned before ids are known. Ranks are threads here."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, POSITIONS
from rank_executors import generate, load
from test_data_parallel import prompts
from thread_ranks import (
    BLOCKS,
    ROWS,
    CalledSteps,
    CapturedSteps,
    Followers,
    count_unknown_ids,
    executor_of_threads,
    groups_of_threads,
)

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.data_parallel import DataParallelScheduler
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.model_runner import ModelRunner

SIZE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    out = tmp_path_factory.mktemp("engines")
    CASES["DeepseekV3ForCausalLM", "yarn"]().save(out / "hf")
    limits = Limits(
        max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=ROWS, tokens_per_block=16
    )
    for name, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=SIZE, expert_parallel=True))):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        build(out / "hf", out / name, config, verify="none")
    return out


def executor_of_ranks(engine: Engine, *, graphs: type[CalledSteps] | None) -> tuple[Executor, Followers, list[ModelRunner]]:
    worlds = [World(group.rank, SIZE, everyone=group, dispatch=TokenDispatch(group)) for group in groups_of_threads(SIZE)]

    def scheduler_of(sizes: dict[str, int]) -> DataParallelScheduler:
        return DataParallelScheduler(
            lambda first: Scheduler(first_row=first, policy="max_utilization", **sizes), SIZE, ROWS, "max_utilization"
        )

    return executor_of_threads(engine, worlds, scheduler_of, graphs=graphs)


@pytest.mark.parametrize("graphs", [CalledSteps, None], ids=["padded", "eager"])
def test_overlapped_steps_generate_the_tokens_of_one_rank(folder: Path, graphs: type[CalledSteps] | None) -> None:
    one = load(folder / "one")
    expected = generate(one, prompts(), 20)
    sampled = generate(one, prompts()[:5], 10, temperature=1.0, seed=5)
    executor, followers, runners = executor_of_ranks(Engine.open(folder / "dp"), graphs=graphs)
    num_unknown = count_unknown_ids(executor)
    try:
        assert generate(executor, prompts(), 20) == expected
        assert generate(executor, prompts()[:5], 10, temperature=1.0, seed=5) == sampled
        assert generate(executor, prompts()[:2], 6, logprobs=1) == [tokens[:6] for tokens in expected[:2]], "a step without a graph"
        assert num_unknown() > 50 and executor.scheduler.num_preemptions > 0
        if graphs is not None:
            shapes = [runner.graphs.replayed for runner in runners]  # type: ignore[union-attr]
            assert len({tuple(found) for found in shapes}) == 1, "all ranks replay graphs of the same shape"
            assert {shape.is_decode for shape in shapes[0]} == {True, False}
    finally:
        followers.close()


def test_ranks_capture_the_same_steps_in_the_same_order(folder: Path) -> None:
    expected = generate(load(folder / "one"), prompts(), 20)
    executor, followers, runners = executor_of_ranks(Engine.open(folder / "dp"), graphs=CapturedSteps)
    graphs = [runner.graphs for runner in runners]
    leader = graphs[0]
    assert isinstance(leader, CapturedSteps)
    leader._pending = dict.fromkeys(leader.shapes.all(), 0.9)  # nothing is captured at first
    try:
        assert generate(executor, prompts(), 20) == expected
        assert any(isinstance(part, Shape) for part in leader.parts), "shapes that steps need are captured between them"
        while executor.capture_next():
            pass
        assert generate(executor, prompts(), 20) == expected
    finally:
        followers.close()
    assert {shape for shape, _ in leader._captured} == set(leader.shapes.all())
    assert all(isinstance(one, CapturedSteps) and one.parts == leader.parts for one in graphs)


def test_only_the_rank_with_poisoned_blocks_zeroes_them(folder: Path) -> None:
    executor, followers, runners = executor_of_ranks(Engine.open(folder / "dp"), graphs=None)
    try:
        for runner in runners:
            runner.caches[0].keys.fill_(1.0)
        executor.runner.zero_blocks([BLOCKS + 2, BLOCKS + 3])
    finally:
        followers.close()
    zeroed = [[block for block in range(BLOCKS) if not runner.caches[0].keys[block].any()] for runner in runners]
    assert zeroed == [[], [2, 3], []]
