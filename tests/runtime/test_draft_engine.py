"""A draft engine on the CPU: answers are those of plain decoding, and an equal engine's drafts are all accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from drive import Driven, request
from test_speculation import COUNT, FEATURES, comparable, count_drafts_ahead, overlapped

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.executor import ExecutorBenchmark
from stoker.cli.commands.bench.latency import measure
from stoker.runtime.client import Cancel
from stoker.runtime.request import Sequence
from stoker.runtime.worker.model_runner import ModelRunner

Make = Callable[..., Driven]
LIMITS = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)


def build_tiny(
    folder: Path, model_type: str = "llama", *, seed: int = 0, limits: Limits = LIMITS, kv_cache_dtype: str | None = None, **changes: Any
) -> Path:
    checkpoint = tiny.save(tiny.model(model_type, seed, **changes), folder / "checkpoint")
    config = BuildConfig(device="cpu", limits=limits, kv_cache_dtype=kv_cache_dtype)
    return build(checkpoint, folder / "engine", config, verify="files").path


@pytest.fixture(scope="session")
def random_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with other weights and another block size than the tiny engine."""
    limits = Limits(max_batch_size=2, max_input_len=180, max_output_len=64, max_num_tokens=64, tokens_per_block=32)
    return build_tiny(tmp_path_factory.mktemp("draft"), seed=9, num_hidden_layers=1, limits=limits)


def rate(driven: Driven) -> float:
    stats = driven.stats
    assert stats.num_draft_tokens > 40
    return float(stats.num_accepted_draft_tokens / stats.num_draft_tokens)


def test_features(drive: Make, prompts: list[list[int]], tiny_engine: Path, random_engine: Path) -> None:
    """All sampling features with chunked prefills and preemptions. A draft engine equal to the model drafts what plain rows sample."""
    cases = [request(prompts[i % len(prompts)], **{"max_tokens": COUNT} | params) for i, params in enumerate(FEATURES)]
    expected = [comparable(answer) for answer in drive().run(*cases)]
    equal = drive(speculate=str(tiny_engine), adaptive_drafts=False, draft_tokens=3, kv_cache_tokens=24 * 16)
    tight: dict[str, Any] = {"max_num_tokens": 40, "kv_cache_tokens": 160, "policy": "max_utilization"}
    unlike = drive(speculate=str(random_engine), adaptive_drafts=False, draft_tokens=20, **tight)
    for driven in (equal, unlike):
        assert [comparable(answer) for answer in driven.run(*cases)] == expected
    assert unlike.stats.num_preemptions > 0 and rate(equal) > 2 * rate(unlike)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_an_equal_draft_engine(
    drive: Make, prompts: list[list[int]], tiny_engine: Path, random_engine: Path, params: dict[str, Any]
) -> None:
    """It is accepted completely, also behind a reused prefix, after a chunked prefill and at block borders."""
    shared = prompts[1] + prompts[4]
    cases = [request([*shared[:64], *prompt], max_tokens=40, **params) for prompt in (*prompts, prompts[0])]
    plain = drive()
    expected = [answer.tokens for answer in plain.run(*cases)]
    driven = drive(speculate=str(tiny_engine), adaptive_drafts=False, draft_tokens=5, max_num_tokens=48)
    assert [answer.tokens for answer in driven.run(cases[0])] == expected[:1]
    assert [answer.tokens for answer in driven.run(*cases[1:])] == expected[1:]
    assert driven.stats.num_reused_tokens > 100 and driven.stats.proposer == "engine"
    assert rate(driven) == 1.0
    unlike = drive(speculate=str(random_engine), adaptive_drafts=False, draft_tokens=5)
    assert [answer.tokens for answer in unlike.run(*cases)] == expected
    assert rate(unlike) < 0.2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 3}], ids=["greedy", "sampled"])
def test_drafts_that_are_planned_before_ids_are_known(
    drive: Make, prompts: list[list[int]], tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """The drafts of an equal engine are all accepted, also after steps in which it did not run and had to catch up."""
    cases = [request(prompt, max_tokens=50 + i, end_ids=(120,) if i % 2 else (), **params) for i, prompt in enumerate(prompts)]
    expected = [answer.tokens for answer in drive().run(*cases)]
    for limits in ((4,), (0, 0, 1, 3)):
        driven = overlapped(drive(speculate=str(tiny_engine), adaptive_drafts=False, draft_tokens=4, max_num_tokens=48), looks_up=False)
        monkeypatch.setattr(
            driven.executor.scheduler.draft_length, "limit", lambda seq, _, limits=limits: limits[len(seq.tokens) // 6 % len(limits)]
        )
        num_ahead = count_drafts_ahead(driven)
        assert [answer.tokens for answer in driven.run(*cases)] == expected
        assert rate(driven) > 0.85 and num_ahead() > 5  # drafts after the end of an answer count as rejected


def test_a_quantized_cache_with_a_sliding_window(prompts: list[list[int]], random_engine: Path, tmp_path: Path) -> None:
    engine = build_tiny(tmp_path, "mistral", sliding_window=24, kv_cache_dtype="int8")
    cases = [request(prompt, max_tokens=40) for prompt in prompts]
    expected = [answer.tokens for answer in Driven(engine, None).run(*cases)]
    for draft in (engine, random_engine):
        driven = Driven(engine, None, speculate=str(draft), adaptive_drafts=False, draft_tokens=5)
        assert [answer.tokens for answer in driven.run(*cases)] == expected
        assert (rate(driven) == 1.0) is (draft == engine)


def test_an_attention_window_is_that_of_the_draft_engine(drive: Make, prompts: list[list[int]], tiny_engine: Path) -> None:
    cases = [request(prompt, max_tokens=40) for prompt in prompts]
    expected = [answer.tokens for answer in drive(attention_window=7).run(*cases)]
    driven = drive(attention_window=7, speculate=str(tiny_engine), adaptive_drafts=False)
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    assert rate(driven) == 1.0


def test_drafts_end_when_they_do_not_pay(
    drive: Make, prompts: list[list[int]], random_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps have no drafts, and then the draft engine computes the tokens of the step only."""
    cases = [request(prompt, max_tokens=60) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate=str(random_engine), draft_tokens=4)
    cost = driven.executor.scheduler.draft_length.cost
    monkeypatch.setattr(cost, "base_by_slope", lambda *_: 8.0)  # measured times depend on what else the machine does
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    assert 0 < driven.stats.num_draft_tokens < 0.25 * len(cases) * 60 * 4


@pytest.mark.parametrize("params", [{}, {"temperature": 1.1, "seed": 4}], ids=["greedy", "sampled"])
def test_tokens_of_steps_without_drafts_are_computed_later(
    drive: Make, prompts: list[list[int]], tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """The draft engine does not run in steps after which no row has drafts, and catches up before it drafts again.

    All drafts of an equal draft engine are accepted, so its cache has all tokens: also those of prefills and of reused blocks.
    """
    shared = prompts[4][:40]
    cases = [request([*shared, *prompt], max_tokens=50, **params) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate=str(tiny_engine), adaptive_drafts=False, draft_tokens=4, max_num_tokens=24)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner) and runner.draft_runner is not None
    drafter, caught_up, passes = runner.draft_runner.drafter, [], []
    catch_up, compute = drafter.catch_up, drafter.compute
    monkeypatch.setattr(drafter, "catch_up", lambda batch: (caught_up.append(batch.num_tokens), catch_up(batch)))
    monkeypatch.setattr(drafter, "compute", lambda inputs: (passes.append(inputs.newest.tolist()), compute(inputs))[1])

    def limit(seq: Sequence, num_rows: int) -> int:
        """Phases of 13 tokens without drafts, which begin with the first token, and of 7 with drafts; they differ by sequence."""
        num_generated = len(seq.tokens) - seq.num_prompt
        return 4 if (num_generated + 3 * seq.seq_id) % 20 >= 13 and num_generated else 0

    monkeypatch.setattr(driven.executor.scheduler.draft_length, "limit", limit)
    assert [answer.tokens for answer in driven.run(cases[0])] == expected[:1]
    alone = len(passes)
    assert 2 < alone < 25, "50 tokens, of which about a third in phases with drafts"
    assert [answer.tokens for answer in driven.run(*cases[1:])] == expected[1:]
    assert rate(driven) == 1.0 and driven.stats.num_reused_tokens > 100
    assert max(caught_up) <= 24 and sum(caught_up) > sum(len(prompt) for prompt in prompts)


def test_a_cancelled_sequence_leaves_no_drafts(drive: Make, prompts: list[list[int]], tiny_engine: Path) -> None:
    """Its row and blocks are used by another sequence, which has its own drafts."""
    others = [request(prompt, max_tokens=30) for prompt in prompts[:2]]
    expected = [answer.tokens for answer in drive().run(*others)]
    driven = drive(speculate=str(tiny_engine), adaptive_drafts=False, draft_tokens=3, max_num_sequences=1)
    ended = request(prompts[3], max_tokens=60)
    driven.submit(ended)
    driven.finish(until=lambda: len(driven.answers[ended.request_id, 0].tokens) > 6)
    driven.send(Cancel(ended.request_id))
    assert [answer.tokens for answer in driven.run(*others)] == expected
    assert rate(driven) == 1.0


def test_a_draft_engine_that_does_not_fit_is_refused(drive: Make, tiny_engine: Path, tmp_path: Path) -> None:
    """Before anything is loaded, with both values."""
    short = build_tiny(
        tmp_path / "short", max_position_embeddings=64, num_hidden_layers=1, limits=Limits(max_input_len=32, max_output_len=16)
    )
    with pytest.raises(ConfigError, match=r"it has 64 positions, and sequences of .*engine have 244"):
        drive(speculate=str(short))
    other = build_tiny(tmp_path / "other", num_hidden_layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["c"] = vocabulary["c"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    size = (other / "tokenizer.json").stat().st_size
    config = json.loads((other / "config.json").read_text())
    config["files"]["tokenizer.json"]["size"] = size
    (other / "config.json").write_text(json.dumps(config))
    ids = vocabulary["a"], vocabulary["c"]
    with pytest.raises(ConfigError, match=rf"token 'a' has the id {ids[0]} in its tokenizer, and {ids[1]} in that of .*engine"):
        drive(speculate=str(other))
    with pytest.raises(ConfigError, match=r"speculate='/nowhere' is not a directory.*Use none, ngram, request, or the directory"):
        drive(speculate="/nowhere")
    with pytest.raises(CheckpointError, match=r"speculate='.*checkpoint' is no engine.*`stoker build`"):
        drive(speculate=str(other.parent / "checkpoint"))


def test_latency_is_reported_by_phase(tiny_engine: Path) -> None:
    runtime = RuntimeConfig(device="cpu", num_threads=1, speculate=str(tiny_engine), draft_tokens=3, adaptive_drafts=False)
    benchmark = ExecutorBenchmark(tiny_engine, runtime)
    draft_runner = benchmark.executor.runner.draft_runner  # type: ignore[attr-defined]
    row = measure(benchmark, batch=2, context=16, steps=16)
    assert row["acceptance"] == 1.0 and 2.0 < row["accepted/step"] <= 3.0
    assert min(row["plan ms"], row["draft ms"], row["verify ms"]) > 0
    assert "run" not in vars(draft_runner) and "plan" not in vars(benchmark.executor.scheduler)
