"""Executors of several ranks in processes that Stoker starts generate the tokens of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cases import GROUPED, MAMBA2, POSITIONS
from oracles import hf_model
from rank_executors import generate, load

from stoker.base.config import Limits, Mapping
from stoker.base.draft_tree import parse_tree
from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.profiling.roofline import products_of
from stoker.runtime.executor import Executor
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.model_runner import ModelRunner

MAPPINGS = {
    "one": Mapping(),
    "tp2": Mapping(tensor_parallel=2),
    "tp4": Mapping(tensor_parallel=4),
    "pp2": Mapping(pipeline_parallel=2),
    "tp2pp2": Mapping(tensor_parallel=2, pipeline_parallel=2),
}
# Sizes as in SmolLM2: 9 and 3 heads are not divisible by 2 or 4, and the head is the embedding.
MODEL = GROUPED | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8, "tie_word_embeddings": True}
# Short steps and a small cache, so that prompts are chunked, sequences are preempted, and prefixes are shared.
TIGHT = {"kv_cache_tokens": 256, "max_num_tokens": 32, "policy": "max_utilization"}

TREE = "[0],[1],[0,0],[1,0],[0,1],[1,0,0],[1,0,1],[1,1]"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """One checkpoint, built for each mapping: 9 heads on 2 and 4 ranks, 3 layers on 2 stages."""
    folder = tmp_path_factory.mktemp("engines")
    hf_model("Llama", **MODEL).save_pretrained(folder / "hf")
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


def record_steps_in_flight(executor: Executor) -> list[int]:
    """Returns a list that receives the number of steps in flight at each launch. Checks that no sequence samples in two of them."""
    counts: list[int] = []
    launch = executor.runner.launch

    def counted(plan: StepPlan) -> object:
        sampling = [
            seq.seq_id for other, _, _ in executor._in_flight for seq, ends in zip(other.sequences, other.samples, strict=True) if ends
        ]
        assert not set(sampling) & {seq.seq_id for seq in plan.sequences}
        counts.append(len(executor._in_flight) + 1)
        return launch(plan)

    executor.runner.launch = counted  # type: ignore[assignment, method-assign]
    return counts


def check_products(executor: Executor) -> None:
    """A breakdown runs a dummy step first, in which all ranks must take part."""
    assert isinstance(executor.runner, ModelRunner)
    layers = len(executor.runner.world.stage.layers(MODEL["num_hidden_layers"]))
    assert [product.of_rows for product in products_of(executor.runner)] == [False] * 4 * layers + [True]


def test_recurrent_states_after_drafts_on_two_ranks(tmp_path: Path, tokenizer: Path) -> None:
    """Both ranks keep the states after the accepted drafts, whose number only the rank that samples knows. Pipeline stages are refused."""
    hf_model("Mamba2", **MAMBA2).save_pretrained(tmp_path / "hf")
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=8, tokens_per_block=16)
    for name in ("one", "tp2", "pp2"):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=MAPPINGS[name])
        build(tmp_path / "hf", tmp_path / name, config, verify="files")
    expected = generate(load(tmp_path / "one"), prompts()[:4], 24)
    drafts = [[max(token - (i % 5 == 4), 0) for i, token in enumerate(answer)] for answer in expected]
    settings = {"speculate": "request", "draft_tokens": 4, "adaptive_drafts": False}
    executor = load(tmp_path / "tp2", **settings)
    try:
        assert generate(executor, prompts()[:4], 24, drafts=drafts) == expected
        stats = executor.snapshot()
        assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 20
    finally:
        executor.close()
    with pytest.raises(ConfigError, match="with pipeline_parallel=2, recurrent states cannot be"):
        load(tmp_path / "pp2", **settings)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_a_draft_engine_on_one_of_the_ranks(engines: Path, expected: list[list[int]], name: str) -> None:
    """It runs on the rank that samples, and the ids of its drafts reach the other ranks with the plan."""
    executor = load(engines / name, **TIGHT, speculate=str(engines / "one"), draft_tokens=4, adaptive_drafts=False)
    try:
        assert generate(executor, prompts(), 24) == expected
        stats = executor.snapshot()
        assert stats.num_accepted_draft_tokens > 0.9 * stats.num_draft_tokens > 100
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_trees_of_drafts_on_several_ranks(engines: Path, expected: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and moves reach the other ranks with the plan. The test proposes the trees."""
    tree, rng = parse_tree(TREE), random.Random(4)
    answers = dict(zip(map(tuple, prompts()), expected, strict=True))

    def propose(seq: Sequence, limit: int) -> list[int]:
        answer, ids = answers[tuple(seq.tokens[: seq.num_prompt])][len(seq.tokens) - seq.num_prompt :], list[int]()
        true_path, node = set[int](), rng.randrange(limit + 1)
        while node > 0:
            true_path.add(node)
            node = tree.parents[node - 1]
        for i, (parent, depth) in enumerate(zip(tree.parents[:limit], tree.depths, strict=False), 1):
            siblings = [ids[j] for j in range(i - 1) if tree.parents[j] == parent]
            right = answer[depth - 1 : depth] if i in true_path else []
            ids.append(next(token for token in (*right, *range(3, 20)) if token not in siblings))
        return ids

    settings = {"speculate": str(engines / "one"), "draft_tree": TREE}
    executor = load(engines / name, **TIGHT, **settings, adaptive_drafts=False)
    try:
        assert isinstance(executor.scheduler, Scheduler) and isinstance(executor.runner, ModelRunner)
        executor.runner.draft_runner = None
        monkeypatch.setattr(executor.scheduler._planner._proposer, "propose", propose)
        assert generate(executor, prompts(), 24) == expected
        stats = executor.snapshot()
        assert stats.num_accepted_draft_tokens > stats.num_draft_steps / 2 > 20
    finally:
        executor.close()


@pytest.mark.parametrize("name", list(MAPPINGS)[1:])
def test_ranks_generate_the_tokens_of_one_rank(engines: Path, expected: list[list[int]], name: str) -> None:
    executor = load(engines / name, **TIGHT)
    in_flight = record_steps_in_flight(executor)
    try:
        assert generate(executor, prompts(), 24) == expected
        stats = executor.snapshot()
        assert stats.num_preemptions > 0 and stats.num_reused_tokens > 0
        stages = MAPPINGS[name].pipeline_parallel
        assert max(in_flight) == stages and in_flight.count(stages) > len(in_flight) // 2
        check_products(executor)
        sampled = generate(executor, prompts()[:3], 5, temperature=1.0, seed=5, repetition_penalty=1.2)
        assert [len(tokens) for tokens in sampled] == [5, 5, 5]
    finally:
        executor.close()
