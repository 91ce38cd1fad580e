"""Whole executors over processes that Stoker starts: the same tokens as one rank, and an end for all when one of them ends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cases import GROUPED, POSITIONS
from loaded import generate, load
from oracles import hf_model

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

MAPPINGS = {
    "one": Mapping(),
    "tp2": Mapping(tensor_parallel=2),
    "tp4": Mapping(tensor_parallel=4),
    "pp2": Mapping(pipeline_parallel=2),
    "tp2pp2": Mapping(tensor_parallel=2, pipeline_parallel=2),
}
# Few blocks and short steps: prompts are cut, sequences give up their blocks, and beginnings are shared.
TIGHT = {"kv_cache_tokens": 256, "max_num_tokens": 32, "policy": "max_utilization"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """One checkpoint, built for each mapping: 6 heads on 4 ranks, 3 layers on 2 stages."""
    folder = tmp_path_factory.mktemp("engines")
    hf_model("Llama", **GROUPED | {"tie_word_embeddings": True}).save_pretrained(folder / "hf")
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=8, tokens_per_block=16)
    for name, mapping in MAPPINGS.items():
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        build(folder / "hf", folder / name, config, verify="files")
    return folder


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 100) for _ in range(40)]
    return [[*shared[: draw.choice((0, 20, 40))], *(draw.randrange(3, 100) for _ in range(draw.randrange(1, 40)))] for _ in range(10)]


@pytest.fixture(scope="module")
def expected(engines: Path) -> list[list[int]]:
    return generate(load(engines / "one"), prompts(), 24)


@pytest.mark.parametrize("name", list(MAPPINGS)[1:])
def test_the_same_tokens_as_one_rank(engines: Path, expected: list[list[int]], name: str) -> None:
    executor = load(engines / name, **TIGHT)
    try:
        assert generate(executor, prompts(), 24) == expected
        stats = executor.snapshot()
        assert stats.num_preemptions > 0 and stats.num_reused_tokens > 0
        sampled = generate(executor, prompts()[:3], 5, temperature=1.0, seed=5, repetition_penalty=1.2)
        assert [len(tokens) for tokens in sampled] == [5, 5, 5]
    finally:
        executor.close()
