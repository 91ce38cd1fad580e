"""attention_window, and the prompts of prefix LMs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import Driven, plain_decode, request
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.config import Limits
from stoker.base.types import FinishReason
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.model_config import ModelConfig
from stoker.core.prefix_lm import BidirectionalPrefix
from stoker.engine.reader import Engine
from stoker.runtime.worker.prefix_lm import fill_prefix_lm_positions

Make = Callable[..., Driven]


def test_a_window_hides_older_tokens(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    """Compared with transformers' Mistral with the same weights, which has a sliding window."""
    import tiny

    sliding = tiny.model("mistral", sliding_window=7, attn_implementation="eager")
    sliding.load_state_dict(model.state_dict())
    expected = [plain_decode(sliding, prompt, 12, lambda row, _: row) for prompt in prompts]
    windowed, whole = drive(attention_window=7, max_num_tokens=16), drive(attention_window=10_000)
    answers = windowed.run(*(request(prompt, max_tokens=12) for prompt in prompts))
    assert [answer.tokens for answer in answers] == expected
    answers = whole.run(*(request(prompt, max_tokens=12) for prompt in prompts))
    assert [answer.tokens for answer in answers] == [plain_decode(model, prompt, 12, lambda row, _: row) for prompt in prompts]
    assert expected != [answer.tokens for answer in answers]


def test_a_window_only_becomes_smaller(tiny_engine: Path) -> None:
    config: ModelConfig = Engine.open(tiny_engine).config.model
    assert [layer.attention.window for layer in config.windowed(9).layers] == [9] * 3
    assert config.windowed(9).windowed(20) == config.windowed(9)
    assert [layer.attention.window for layer in config.windowed(9).windowed(4).layers] == [4] * 3


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=6))
def test_the_positions_of_a_step_are_those_of_each_prefix(rows: list[tuple[int, int, int, int]]) -> None:
    prefixes = [BidirectionalPrefix(length, min(mask, length - 1)) for length, mask, _, _ in rows]
    indices = [range(start, start + count) for _, _, start, count in rows]
    positions = np.array([i for span in indices for i in span], dtype=np.int32)
    blocks, lens = np.empty_like(positions), np.empty(len(rows), dtype=np.int32)
    fill_prefix_lm_positions(prefixes, np.array([len(span) for span in indices], dtype=np.int32), positions, blocks, lens)
    each = [(prefix, i) for prefix, span in zip(prefixes, indices, strict=True) for i in span]
    assert positions.tolist() == [prefix.position(i) for prefix, i in each]
    assert blocks.tolist() == [prefix.block_position(i) for prefix, i in each]
    assert lens.tolist() == [prefix.length for prefix in prefixes]


@pytest.fixture(scope="session")
def prefix_engine(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))
    from cases import CASES

    folder = tmp_path_factory.mktemp("prefix")
    reference = CASES["ChatGLM1Model", "plain"]()
    reference.save(folder / "hf")
    limits = Limits(max_input_len=60, max_output_len=60, max_num_tokens=40, max_batch_size=4, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    return build(folder / "hf", folder / "engine", config, verify="none").path


def test_a_prompt_without_mask_or_start_token_is_rejected_without_effect_on_others(prefix_engine: Path) -> None:
    driven = Driven(prefix_engine, None, kv_cache_tokens=512)
    good = [5, 6, 98, 99]
    no_start, no_mask, too_long, scored, answer = driven.run(
        request([5, 6, 98], max_tokens=4),
        request([5, 6, 99], max_tokens=4),
        request([*[5] * 45, 98, 99], max_tokens=4),
        request(good, max_tokens=4, prompt_logprobs=1),
        request(good, max_tokens=4),
    )
    for rejected, message in (
        (no_start, "starts the answer"),
        (no_mask, "mask token"),
        (too_long, "max_num_tokens=40"),
        (scored, "prompt_logprobs"),
    ):
        assert rejected.reason is FinishReason.ERROR and rejected.error is not None
        assert rejected.error.status == 400 and message in rejected.error.message
    assert answer.reason is FinishReason.LENGTH
    assert driven.run(request(good, max_tokens=4))[0].cached == 0
    driven.check_idle()
