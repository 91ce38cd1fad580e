"""The embedded default model, from its GGUF file to text, compared with transformers (golden.json)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker import LLM, SamplingParams
from stoker.base.types import FinishReason

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.fixture(scope="module")
def llm(smollm2_engine: Path) -> Iterator[LLM]:
    with LLM(smollm2_engine, kv_cache_tokens=4096, num_threads=1) as loaded:
        yield loaded


def greedy(golden: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=len(golden["token_ids"]))


@pytest.fixture(scope="module")
def batched(llm: LLM) -> list[Any]:
    """All golden prompts twice in one batch, so that rows are added and removed and prefixes are shared."""
    cases = GOLDEN["chats"] + GOLDEN["texts"]
    return llm.generate([case["prompt_ids"] for case in cases] * 2, [greedy(case) for case in cases] * 2)


def test_prompts_equal_the_token_ids_of_transformers(llm: LLM) -> None:
    for case in GOLDEN["chats"]:
        assert llm.chat_prompt([{"role": "user", "content": case["message"]}]) == case["prompt_ids"]
    for case in GOLDEN["texts"]:
        assert llm.service.encode(case["prompt"]) == case["prompt_ids"]


def test_a_batch_equals_greedy_decoding_of_transformers(batched: list[Any]) -> None:
    cases = (GOLDEN["chats"] + GOLDEN["texts"]) * 2
    assert [answer.choices[0].token_ids for answer in batched] == [case["token_ids"] for case in cases]
    assert [answer.choices[0].text for answer in batched] == [case["text"] for case in cases]


def test_a_single_request_equals_the_batch(llm: LLM, batched: list[Any]) -> None:
    alone = llm.generate(GOLDEN["texts"][1]["prompt_ids"], greedy(GOLDEN["texts"][1]))
    together = batched[len(GOLDEN["chats"]) + 1]
    for one, other in zip(alone.choices, together.choices, strict=True):
        assert msgspec.structs.replace(one, admission=None) == msgspec.structs.replace(other, admission=None)


def test_a_finished_sequence_ends_with_the_end_id(batched: list[Any]) -> None:
    assert batched[0].choices[0].finish_reason is FinishReason.STOP
    assert batched[0].choices[0].text == "The capital of Japan is Tokyo."
    assert batched[3].choices[0].finish_reason is FinishReason.LENGTH


def test_the_joined_stream_equals_the_completion(llm: LLM) -> None:
    case = GOLDEN["texts"][1]

    async def stream() -> list[Any]:
        return [delta async for delta in llm.stream(case["prompt_ids"], greedy(case))]

    deltas = asyncio.run(stream())
    assert len(deltas) > 10
    assert "".join(delta.text for delta in deltas) == case["text"]
    assert [token for delta in deltas for token in delta.token_ids] == case["token_ids"]


def test_a_closed_stream_frees_its_blocks(llm: LLM) -> None:
    """The statistics of the executor count blocks in use during the stream, and none shortly after it was closed."""
    long = SamplingParams(max_tokens=512, ignore_eos=True)

    async def close_early() -> int:
        stream = llm.stream("Count from one to a thousand: one, two,", long)
        async for _ in stream:
            break
        used = _used_blocks(llm)
        await stream.aclose()  # type: ignore[attr-defined]
        return used

    steps = llm.stats().num_steps
    assert asyncio.run(close_early()) > 0
    deadline = time.monotonic() + 10
    while _used_blocks(llm) and time.monotonic() < deadline:
        pass
    assert _used_blocks(llm) == 0
    assert llm.stats().num_steps - steps < 20  # far fewer than max_tokens
    assert llm.stats().num_cancelled > 0


def _used_blocks(llm: LLM) -> int:
    stats = llm.stats()
    return stats.num_blocks - stats.num_free_blocks
