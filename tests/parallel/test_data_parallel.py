"""Data-parallel attention with expert parallelism: every rank has its own sequences, and all of them generate the tokens of one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from cases import CASES, POSITIONS
from rank_executors import generate, load
from safetensors.torch import load_file

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.types import FinishReason, SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.estimate import estimate
from stoker.engine.reader import Engine
from stoker.runtime.client import Cancel
from stoker.runtime.executor import Executor
from stoker.runtime.request import SequenceOutput, TokenRequest
from stoker.runtime.schedule.data_parallel import DataParallelScheduler
from stoker.runtime.start_checks import check_start

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


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """Returns the folder with the engines `one` and `dp` of a model."""

    @cache
    def build_engines(name: str) -> Path:
        row, variant, size = MODELS[name]
        folder = tmp_path_factory.mktemp("engines")
        CASES[row, variant]().save(folder / "hf")
        half = POSITIONS // 2
        limits = Limits(max_input_len=half, max_output_len=half, max_num_tokens=64, max_batch_size=4, tokens_per_block=16)
        for out, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=size, expert_parallel=True))):
            config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
            build(folder / "hf", folder / out, config, verify="files")
        return folder

    return build_engines


def parts_of_steps(executor: Executor) -> list[list[int]]:
    """Returns a list that receives the number of rows of each rank in each step."""
    found: list[list[int]] = []
    launch = executor.runner.launch

    def recorded(plan):  # type: ignore[no-untyped-def]
        found.append([len(part) for part in plan.parts])
        return launch(plan)

    executor.runner.launch = recorded  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def mixtral(engines: Callable[[str], Path]) -> Iterator[Executor]:
    """An executor of three ranks."""
    executor = load(engines("Mixtral") / "dp", **TIGHT)
    yield executor
    executor.close()


def run(executor: Executor, requests: list[TokenRequest], num_turns: int = 10_000) -> dict[tuple[str, int], list[SequenceOutput]]:
    """The outputs of each sequence, by request and index, when all have ended or after `num_turns` steps."""
    executor.mailbox.submit(requests)  # type: ignore[attr-defined]
    found: dict[tuple[str, int], list[SequenceOutput]] = {(r.request_id, i): [] for r in requests for i in range(r.params.n)}
    for _ in range(num_turns):
        executor.turn(0.0)
        for output in executor.mailbox.pop_outputs():  # type: ignore[attr-defined]
            assert output.error is None, output.error
            found[output.request_id, output.index].append(output)
        if all(outputs and outputs[-1].finish_reason is not None for outputs in found.values()):
            break
    return found


def request(name: str, prompt: list[int], **params: object) -> TokenRequest:
    settings = SamplingParams(**{"max_tokens": 12} | params)  # type: ignore[arg-type]
    return TokenRequest(request_id=name, prompt_ids=prompt, params=settings, end_ids=[2])


def check_equal(found: list[SequenceOutput], expected: list[SequenceOutput]) -> None:
    """Equal tokens and finish reasons, and equal log-probabilities up to the order of sums."""
    assert [i for out in found for i in out.token_ids] == [i for out in expected for i in out.token_ids]
    assert found[-1].finish_reason == expected[-1].finish_reason
    for which in ("logprobs", "prompt_logprobs"):
        scores = [[score for out in outputs for score in getattr(out, which) or () if score is not None] for outputs in (found, expected)]
        assert [score.token_id for score in scores[0]] == [score.token_id for score in scores[1]]
        assert [score.logprob for score in scores[0]] == pytest.approx([score.logprob for score in scores[1]], abs=1e-3)


@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_generate_the_tokens_of_one_rank(engines: Callable[[str], Path], name: str) -> None:
    folder, size = engines(name), MODELS[name][2]
    expected = generate(load(folder / "one"), prompts(), 24)
    executor = load(folder / "dp", **TIGHT)
    steps = parts_of_steps(executor)
    try:
        assert generate(executor, prompts(), 24) == expected
        stats, scheduler = executor.snapshot(), executor.scheduler
        assert isinstance(scheduler, DataParallelScheduler)
        assert stats.num_preemptions > 0 and stats.num_reused_tokens > 0
        assert all(any(rows[rank] for rows in steps) for rank in range(size)), "a rank was never used"
        assert any(len(set(rows)) > 1 for rows in steps), "no ragged step"
        assert generate(executor, prompts()[:1], 24) == expected[:1]
        assert steps[-1].count(0) == size - 1, "one rank works, and the others run dummy steps"
        assert (stats.num_free_blocks, stats.num_blocks) == (size * 12, size * 12)
    finally:
        executor.close()


def test_every_sampling_feature_works_on_every_rank(engines: Callable[[str], Path], mixtral: Executor) -> None:
    """The leader samples for all ranks, also rows with log-probabilities, several answers, penalties and seeds."""
    folder = engines("Mixtral")
    features: list[dict[str, object]] = [
        {}, {"temperature": 1.0, "seed": 7, "n": 3}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.5, "min_tokens": 4},
        {"temperature": 0.8, "top_k": 5, "seed": 1, "presence_penalty": 0.5}, {"logit_bias": {9: 50.0}}, {"stop_token_ids": [9, 30, 31]},
        {"allowed_token_ids": [5, 6, 7], "bad_words": [[6]]},
    ]  # fmt: skip
    requests = [request(f"r{i}", prompts()[i], **feature) for i, feature in enumerate(features)]
    one = load(folder / "one")
    expected = run(one, requests)
    one.close()
    found = run(mixtral, requests)
    for key, outputs in expected.items():
        check_equal(found[key], outputs)
    alone = run(mixtral, [request("alone", prompts()[1], temperature=1.0, seed=7)])
    check_equal(alone["alone", 0], expected["r1", 0])


def test_cancelled_requests_leave_the_others_unchanged(engines: Callable[[str], Path], mixtral: Executor) -> None:
    requests = [request(f"r{i}", prompt, max_tokens=20, ignore_eos=True) for i, prompt in enumerate(prompts())]
    expected = generate(load(engines("Mixtral") / "one"), prompts(), 20)
    partial = run(mixtral, requests, num_turns=12)
    for i in (0, 4, 9):
        mixtral.mailbox.messages.append(Cancel(f"r{i}"))  # type: ignore[attr-defined]
    while mixtral.is_busy or mixtral.mailbox.messages:  # type: ignore[attr-defined]
        mixtral.turn(0.0)
        for output in mixtral.mailbox.pop_outputs():  # type: ignore[attr-defined]
            partial[output.request_id, 0].append(output)
    for i, tokens in enumerate(expected):
        outputs = partial[f"r{i}", 0]
        ids = [token for output in outputs for token in output.token_ids]
        cancelled = outputs[-1].finish_reason is FinishReason.CANCELLED
        assert cancelled == (i in (0, 4, 9)) and ids == (tokens[: len(ids)] if cancelled else tokens)
    assert mixtral.snapshot().num_free_blocks == mixtral.stats.num_blocks


def test_a_rank_that_dies_ends_the_engine(engines: Callable[[str], Path]) -> None:
    executor = load(engines("Mixtral") / "dp")
    try:
        executor._ranks._local.followers[1].process.kill()  # type: ignore[union-attr]
        with pytest.raises(RankError, match="rank 2 on cpu"):
            run(executor, [request("r", [5, 6, 7], max_tokens=100, ignore_eos=True)])
    finally:
        executor.close()


def test_only_experts_are_divided(engines: Callable[[str], Path]) -> None:
    folder = engines("Mixtral")
    config, single = Engine.open(folder / "dp").config, Engine.open(folder / "one").config
    sizes, of_one = estimate(config), estimate(single)
    assert len(sizes.files) == 3 and all(0 < config.files[name].size - size < 8192 for name, size in sizes.files.items())  # the headers
    assert sizes.kv_token == of_one.kv_token and sizes.activations > of_one.activations
    one = load_file(folder / "one" / "rank0.safetensors")
    ranks = [load_file(folder / "dp" / f"rank{rank}.safetensors") for rank in range(3)]
    for name, tensor in one.items():
        for rank in ranks:
            assert (rank[name].shape[0] == 2) if ".experts." in name else rank[name].equal(tensor), name  # 5 experts, and one of zeros


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculate": "ngram"}, "speculate=ngram"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "kv_events="),
        ({"transfer": "127.0.0.1:0"}, "transfer="),
        ({"target_itl_ms": 20.0}, "target_itl_ms=20.0"),
        ({"target_ttft_ms": 20.0}, "target_ttft_ms=20.0"),
    ],
)
def test_unsupported_settings_are_refused_by_name(engines: Callable[[str], Path], settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match="built with data_parallel=3") as caught:
        check_start(Engine.open(engines("Mixtral") / "dp"), RuntimeConfig(**settings))  # type: ignore[arg-type]
    assert named in str(caught.value)
