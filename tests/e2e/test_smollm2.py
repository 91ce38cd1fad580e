"""The embedded default model from its GGUF file to answers, held against transformers' (golden.json)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def together(llm: LLM) -> list[Any]:
    """Every golden prompt at once, twice over, so that rows join, leave and share prefixes on the way."""
    cases = GOLDEN["chats"] + GOLDEN["texts"]
    return llm.generate([case["prompt_ids"] for case in cases] * 2, [greedy(case) for case in cases] * 2)


def test_prompts_become_transformers_token_ids(llm: LLM) -> None:
    for case in GOLDEN["chats"]:
        assert llm.chat_prompt([{"role": "user", "content": case["message"]}]) == case["prompt_ids"]
    for case in GOLDEN["texts"]:
        assert llm.service.encode(case["prompt"]) == case["prompt_ids"]


def test_answers_in_one_batch_are_transformers_greedy_answers(together: list[Any]) -> None:
    cases = (GOLDEN["chats"] + GOLDEN["texts"]) * 2
    assert [answer.choices[0].token_ids for answer in together] == [case["token_ids"] for case in cases]
    assert [answer.choices[0].text for answer in together] == [case["text"] for case in cases]


def test_an_answer_alone_is_the_answer_under_load(llm: LLM, together: list[Any]) -> None:
    alone = llm.generate(GOLDEN["texts"][1]["prompt_ids"], greedy(GOLDEN["texts"][1]))
    assert alone.choices == together[len(GOLDEN["chats"]) + 1].choices


def test_a_finished_answer_ends_with_the_models_end_id(together: list[Any]) -> None:
    assert together[0].choices[0].finish_reason is FinishReason.STOP
    assert together[0].choices[0].text == "The capital of Japan is Tokyo."
    assert together[3].choices[0].finish_reason is FinishReason.LENGTH


def test_the_joined_stream_is_the_whole_answer(llm: LLM) -> None:
    case = GOLDEN["texts"][1]

    async def stream() -> list[Any]:
        return [delta async for delta in llm.stream(case["prompt_ids"], greedy(case))]

    deltas = asyncio.run(stream())
    assert len(deltas) > 10
    assert "".join(delta.text for delta in deltas) == case["text"]
    assert [token for delta in deltas for token in delta.token_ids] == case["token_ids"]


def test_a_stream_that_is_left_gives_its_blocks_back(llm: LLM) -> None:
    """Blocks are counted through the executor's statistics: in use while it streams, none a moment after it was left."""
    long = SamplingParams(max_tokens=512, ignore_eos=True)

    async def leave() -> int:
        stream = llm.stream("Count from one to a thousand: one, two,", long)
        async for _ in stream:
            break
        used = _used_blocks(llm)
        await stream.aclose()  # type: ignore[attr-defined]
        return used

    steps = llm.stats().num_steps
    assert asyncio.run(leave()) > 0
    deadline = time.monotonic() + 10
    while _used_blocks(llm) and time.monotonic() < deadline:
        pass
    assert _used_blocks(llm) == 0
    assert llm.stats().num_steps - steps < 20  # far fewer than the 512 that were asked for
    assert llm.stats().num_cancelled > 0


def _used_blocks(llm: LLM) -> int:
    stats = llm.stats()
    return stats.num_blocks - stats.num_free_blocks
