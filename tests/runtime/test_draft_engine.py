"""A draft engine on the CPU: answers are those of plain decoding, and an equal engine's drafts are all accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from drive import Driven, request
from test_speculation import COUNT, FEATURES, comparable

from stoker.base.config import Limits
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

Make = Callable[..., Driven]
LIMITS = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)


def build_tiny(folder: Path, model_type: str = "llama", *, seed: int = 0, limits: Limits = LIMITS, **changes: Any) -> Path:
    checkpoint = tiny.save(tiny.model(model_type, seed, **changes), folder / "checkpoint")
    return build(checkpoint, folder / "engine", BuildConfig(device="cpu", limits=limits), verify="files").path


@pytest.fixture(scope="session")
def random_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with other weights and another block size than the tiny engine."""
    limits = Limits(max_batch_size=2, max_input_len=180, max_output_len=64, max_num_tokens=64, tokens_per_block=32)
    return build_tiny(tmp_path_factory.mktemp("draft"), seed=9, num_hidden_layers=1, limits=limits)


def rate(driven: Driven) -> float:
    stats = driven.stats
    assert stats.num_draft_tokens > 50
    return float(stats.num_accepted_draft_tokens / stats.num_draft_tokens)


@pytest.mark.parametrize(
    "settings",
    [{"draft_tokens": 3}, {"draft_tokens": 20, "max_num_tokens": 40, "kv_cache_tokens": 160, "policy": "max_utilization"}],
    ids=str,
)
def test_features(drive: Make, prompts: list[list[int]], tiny_engine: Path, random_engine: Path, settings: dict[str, Any]) -> None:
    """All sampling features with chunked prefills and preemptions. A draft engine equal to the model drafts what plain rows sample."""
    cases = [request(prompts[i % len(prompts)], **{"max_tokens": COUNT} | params) for i, params in enumerate(FEATURES)]
    plain = drive()
    expected = [comparable(answer) for answer in plain.run(*cases)]
    for draft in (tiny_engine, random_engine):
        driven = drive(speculate=str(draft), adaptive_drafts=False, **{"kv_cache_tokens": 24 * 16} | settings)
        assert [comparable(answer) for answer in driven.run(*cases)] == expected
        assert driven.stats.num_preemptions > 0 or "policy" not in settings


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
    assert driven.stats.num_reused_tokens > 100
    assert rate(driven) == 1.0
    unlike = drive(speculate=str(random_engine), adaptive_drafts=False, draft_tokens=5)
    assert [answer.tokens for answer in unlike.run(*cases)] == expected
    assert rate(unlike) < 0.2


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
