"""Draft engines with recurrent states on the CPU: the state of each row follows the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drive import Driven, request
from test_draft_engine import build_tiny, rate
from test_padded_drafts import CalledSteps
from test_speculation import FEATURES, comparable

from stoker.base.errors import ConfigError
from stoker.runtime.client import Cancel
from stoker.runtime.request import Sequence
from stoker.runtime.worker.model_runner import ModelRunner

Make = Callable[..., Driven]
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "mamba2": {"state_size": 8, "num_heads": 6, "head_dim": 16, "n_groups": 2, "num_hidden_layers": 2},
    "falcon_h1": {
        "num_hidden_layers": 2, "mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 12,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recurrent")
    return {name: build_tiny(folder / name, name, **changes) for name, changes in MODELS.items()}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "top_k": 40, "seed": 3}], ids=["greedy", "sampled"])
def test_an_equal_draft_engine(engines: dict[str, Path], prompts: list[list[int]], name: str, params: dict[str, Any]) -> None:
    """It is accepted completely, also behind a reused prefix and after a chunked prefill. Its model has states, too."""
    shared = prompts[1] + prompts[4]
    calls = [request([*shared[:64], *prompt], max_tokens=24, **params) for prompt in (*prompts[:4], prompts[0])]
    expected = [answer.tokens for answer in Driven(engines[name], None, kv_cache_tokens=1024).run(*calls)]
    driven = Driven(
        engines[name], None, kv_cache_tokens=1024, speculate=str(engines[name]), adaptive_drafts=False, draft_tokens=5, max_num_tokens=48
    )
    assert [answer.tokens for answer in driven.run(*calls[:1])] == expected[:1]
    assert [answer.tokens for answer in driven.run(*calls[1:])] == expected[1:]
    assert driven.stats.num_reused_tokens > 100 and rate(driven) == 1.0
    driven.check_idle()


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_features(drive: Make, prompts: list[list[int]], engines: dict[str, Path], name: str) -> None:
    """All sampling features of a model with attention, with chunked prefills and preemptions. Most drafts are rejected."""
    calls = [request(prompts[i % len(prompts)], **{"max_tokens": 20} | params) for i, params in enumerate(FEATURES[:8])]
    expected = [comparable(answer) for answer in drive().run(*calls)]
    tight: dict[str, Any] = {"max_num_tokens": 40, "kv_cache_tokens": 160, "policy": "max_utilization"}
    driven = drive(speculate=str(engines[name]), adaptive_drafts=False, draft_tokens=4, **tight)
    assert [comparable(answer) for answer in driven.run(*calls)] == expected
    assert driven.stats.num_preemptions > 0 and driven.stats.num_draft_tokens > 100


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_states_follow_accepted_tokens(
    engines: dict[str, Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The model rejects a part of the drafts of an equal engine, because of its penalties. The drafts after that are still those of the
    model without penalties, so that the state has the accepted tokens only."""
    engine, prompt = engines[name], prompts[1]
    driven = Driven(engine, None, kv_cache_tokens=1024, speculate=str(engine), adaptive_drafts=False, draft_tokens=4)
    plain = Driven(engine, None, kv_cache_tokens=1024)
    paths = list[int]()
    record = driven.executor.scheduler.draft_length.record  # type: ignore[union-attr]

    def add(seq: Sequence, num_drafts: int, path: Any) -> None:
        paths.append(len(path))
        if seq.proposal:  # the drafts that follow the accepted ones and the newest token
            (answer,) = plain.run(request(list(seq.tokens), max_tokens=len(seq.proposal)))
            assert list(seq.proposal) == answer.tokens
        record(seq, num_drafts, path)

    monkeypatch.setattr(driven.executor.scheduler.draft_length, "record", add)
    params: dict[str, Any] = {"max_tokens": 24, "frequency_penalty": 0.4}
    (answer,) = driven.run(request(prompt, **params))
    assert [answer.tokens] == [one.tokens for one in Driven(engine, None).run(request(prompt, **params))]
    assert len(set(paths)) > 2, "different numbers of drafts are accepted"


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_tokens_of_steps_without_drafts_are_computed_later(
    engines: dict[str, Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows that lack tokens do not change the state of their slot, and catch up from there; rows with a reused prefix from its start."""
    calls = [request([*prompts[4][:40], *prompt], max_tokens=40) for prompt in prompts]
    expected = [answer.tokens for answer in Driven(engines[name], None, kv_cache_tokens=1024).run(*calls)]
    driven = Driven(
        engines[name], None, kv_cache_tokens=1024, speculate=str(engines[name]), adaptive_drafts=False, draft_tokens=4, max_num_tokens=24
    )

    def limit(seq: Sequence, num_rows: int) -> int:
        num_generated = len(seq.tokens) - seq.num_prompt
        return 4 if (num_generated + 3 * seq.seq_id) % 20 >= 11 and num_generated else 0

    monkeypatch.setattr(driven.executor.scheduler.draft_length, "limit", limit)
    assert [answer.tokens for answer in driven.run(*calls[:1])] == expected[:1]
    assert [answer.tokens for answer in driven.run(*calls[1:])] == expected[1:]
    assert rate(driven) == 1.0 and driven.stats.num_reused_tokens > 100


def test_a_row_is_used_by_another_sequence(engines: dict[str, Path], prompts: list[list[int]]) -> None:
    """After a cancellation, with a reused prefix. The state of the earlier sequence is not read."""
    engine = engines["mamba"]
    others = [request(prompts[4][:count], max_tokens=30) for count in (33, 20)]
    expected = [answer.tokens for answer in Driven(engine, None).run(*others)]
    driven = Driven(engine, None, speculate=str(engine), adaptive_drafts=False, draft_tokens=3, max_num_sequences=1)
    ended = request(prompts[4], max_tokens=60)
    driven.submit(ended)
    driven.finish(until=lambda: len(driven.answers[ended.request_id, 0].tokens) > 6)
    driven.send(Cancel(ended.request_id))
    assert [answer.tokens for answer in driven.run(*others)] == expected
    assert rate(driven) == 1.0


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_padded_steps(engines: dict[str, Path], prompts: list[list[int]], name: str) -> None:
    """Steps as captured graphs run them: padding changes the state of no row."""
    calls = [request(prompt, max_tokens=24) for prompt in prompts[:4]]
    expected = [answer.tokens for answer in Driven(engines[name], None).run(*calls)]
    driven = Driven(engines[name], None, speculate=str(engines[name]), draft_tokens=4, adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = steps = CalledSteps(runner, 4)
    assert [answer.tokens for answer in driven.run(*calls)] == expected
    assert steps.num_runs > 5 and rate(driven) == 1.0
    for shape in steps.shapes.verifications()[:2]:
        steps.trace(shape)


def test_trees_are_refused(drive: Make, engines: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"the recurrent states of the draft engine .*engine follow one chain of drafts"):
        drive(speculate=str(engines["mamba"]), draft_tree="[0],[1]")
