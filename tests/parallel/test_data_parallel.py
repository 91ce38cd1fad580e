"""Data-parallel attention with expert parallelism: every rank has its own sequences, and all of them generate the tokens of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cases import CASES, POSITIONS
from rank_executors import generate, load

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.data_parallel import DataParallelScheduler

MODELS = {
    "Mixtral": ("MixtralForCausalLM", "plain", 3),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "plain", 2),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "yarn", 2),
}
# Short steps and a small cache per rank, so that prompts are chunked, sequences are preempted, and prefixes are shared.
TIGHT = {"kv_cache_tokens": 192, "max_num_tokens": 32, "policy": "max_utilization"}


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 90) for _ in range(40)]
    return [[*shared[: draw.choice((0, 20, 40))], *(draw.randrange(3, 90) for _ in range(draw.randrange(1, 40)))] for _ in range(10)]


def build_engines(folder: Path, name: str, tokenizer: Path) -> int:
    """Build `folder`/one and `folder`/dp. Returns the number of data-parallel ranks of the latter."""
    row, variant, size = MODELS[name]
    CASES[row, variant]().save(folder / "hf")
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=4, tokens_per_block=16)
    for out, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=size, expert_parallel=True))):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        build(folder / "hf", folder / out, config, verify="files")
    return size


def parts_of_steps(executor: Executor) -> list[list[int]]:
    """Returns a list that receives the number of rows of each rank in each step."""
    found: list[list[int]] = []
    launch = executor.runner.launch

    def recorded(plan):  # type: ignore[no-untyped-def]
        found.append([len(part) for part in plan.parts])
        return launch(plan)

    executor.runner.launch = recorded  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_generate_the_tokens_of_one_rank(name: str, tmp_path: Path, tokenizer: Path) -> None:
    size = build_engines(tmp_path, name, tokenizer)
    expected = generate(load(tmp_path / "one"), prompts(), 24)
    executor = load(tmp_path / "dp", **TIGHT)
    steps = parts_of_steps(executor)
    try:
        assert generate(executor, prompts(), 24) == expected
        stats, scheduler = executor.snapshot(), executor.scheduler
        assert isinstance(scheduler, DataParallelScheduler)
        assert stats.num_preemptions > 0 and stats.num_reused_tokens > 0
        assert all(any(rows[rank] for rows in steps) for rank in range(size)), "a rank was never used"
        assert any(len(set(rows)) > 1 for rows in steps), "no ragged step"
        assert generate(executor, prompts()[:1], 24) == expected[:1], "one rank works, the others execute dummy steps"
        assert 0 in steps[-1]
        assert stats.num_free_blocks <= stats.num_blocks == size * 12
    finally:
        executor.close()
