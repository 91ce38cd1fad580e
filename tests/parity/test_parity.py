"""Every row of the architecture table, from a checkpoint in its own layout through the build to logits, against an independent oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import CASES
from harness import Harness
from oracles import Reference
from proof import assert_close, check_generation

from runtime.drive import Driven, request
from stoker import LLM
from stoker.base.config import Limits
from stoker.base.types import SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.models import all_architectures

NUM_NEW = 64
# Cases that also draft with their own engine: different positions, caches (MLA, grouped heads), windows and feed-forwards.
SELF_DRAFTED = {
    ("MistralForCausalLM", "window"), ("DeepseekV3ForCausalLM", "yarn"), ("GPT2LMHeadModel", "plain"), ("BloomForCausalLM", "plain"),
    ("Gemma2ForCausalLM", "plain"), ("FalconForCausalLM", "7b"), ("MixtralForCausalLM", "plain"), ("OPTForCausalLM", "350m"),
}  # fmt: skip


def test_every_row_is_proven() -> None:
    assert {row.name for row in all_architectures()} == {row for row, _ in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].replace(' ', '_')}")
def test_logits_and_tokens_equal_the_reference(case: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
    reference = CASES[case]()
    reference.save(tmp_path / "hf")
    limits = Limits(
        max_input_len=reference.positions // 2,
        max_output_len=reference.positions // 2,
        max_num_tokens=512,
        max_batch_size=8,
        tokens_per_block=16,
    )
    engine = build(
        tmp_path / "hf",
        tmp_path / "engine",
        BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits),
        verify="none",
    )
    assert engine.config.model.architecture == case[0]
    harness = Harness(tmp_path / "engine", reference.positions)
    prompt, others, main = check_generation(harness, reference, NUM_NEW)
    if not harness.config.requires_whole_prompt and not harness.config.has_state:  # whose states the executor restores
        check_prefix_reuse(harness, reference, prompt, main)
    check_served(
        tmp_path / "engine", reference, [prompt, *others], harness.config.requires_whole_prompt, has_state=harness.config.has_state
    )
    if harness.config.has_state and case[1] == "plain":
        check_supplied_drafts(tmp_path / "engine", [prompt, *others], "cpu")
    if case in SELF_DRAFTED:
        check_draft_engine(tmp_path / "engine", [prompt, *others], [main.tokens[len(prompt) :]])


def check_prefix_reuse(harness: Harness, reference: Reference, prompt: list[int], main: object) -> None:
    """A prompt with the prefix of a computed sequence reuses its blocks."""
    again = harness.start([*prompt[:18], 5, 6, 7], share=main)  # type: ignore[arg-type]
    assert again.computed == 16
    harness.step([(again, 5)])
    assert_close(torch.stack([again.logits[i] for i in range(16, 21)]), reference.logits(again.tokens[:-1], 21)[16:])


def check_served(
    engine: Path, reference: Reference, prompts: list[list[int]], in_one_step: bool, device: str = "cpu", *, has_state: bool = False
) -> None:
    """The executor generates the same tokens, with a cache that is too small for all sequences, and with chunked prefill.

    `in_one_step`: prompts are prefilled in one step.
    """
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        engine, device=device, policy="max_utilization", max_num_tokens=40 if in_one_step else 16, kv_cache_tokens=14 * 16, num_threads=1
    ) as llm:
        answers = llm.generate(prompts, params)
        # Shares two blocks with an earlier prompt. Its answer is short, because the others reach further positions.
        later = llm.generate([*prompts[2][:33], *(prompts[2][-2:] if in_one_step else [4])], msgspec.structs.replace(params, max_tokens=8))
        stats = llm.stats()
    assert stats.num_preemptions > 0 and (stats.num_reused_tokens > 0) == (not in_one_step)
    check_speculation(engine, prompts, params, [answer.choices[0].token_ids for answer in answers], device, repeats=not has_state)
    for answer in [*answers, later]:
        tokens = answer.choices[0].token_ids
        sequence = [*answer.prompt_token_ids, *tokens]
        first = len(answer.prompt_token_ids) - 1
        assert list(tokens) == reference.logits(sequence[:-1], first + 1)[first:].argmax(-1).tolist()


def check_speculation(
    engine: Path, prompts: list[list[int]], params: SamplingParams, expected: list[list[int]], device: str, *, repeats: bool = True
) -> None:
    """Draft tokens do not change the answers. Random models repeat themselves, so that most drafts are accepted; not those with states."""
    with LLM(engine, device=device, speculate="ngram", adaptive_drafts=False, num_threads=1) as llm:
        answers = llm.generate(prompts, params)
        stats = llm.stats()
    assert [answer.choices[0].token_ids for answer in answers] == expected
    assert stats.num_draft_tokens >= stats.num_accepted_draft_tokens >= repeats and stats.num_free_blocks == stats.num_blocks


def check_supplied_drafts(engine: Path, prompts: list[list[int]], device: str) -> None:
    """Recurrent states after accepted and rejected drafts: answers are those without drafts, also sampled ones, with preemptions and
    chunked prefill. Every seventh draft is wrong."""
    choices = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4, "n": 2}]
    calls = [request(prompt, max_tokens=NUM_NEW, **params) for prompt in prompts for params in choices]
    settings: dict[str, Any] = {"policy": "max_utilization", "max_num_tokens": 24, "kv_cache_tokens": 14 * 16}
    plain = Driven(engine, None, device, **settings)
    expected = [answer.tokens for answer in plain.run(*calls)]
    drafted = []
    for call in calls:
        answer = plain.answers[call.request_id, 0].tokens
        drafted.append(again := request(call.prompt_ids))
        again.params, again.draft_ids = call.params, [max(token - (i % 7 == 6), 0) for i, token in enumerate(answer)]
    driven = Driven(engine, None, device, speculate="request", adaptive_drafts=False, draft_tokens=5, **settings)
    assert [answer.tokens for answer in driven.run(*drafted)] == expected
    driven.check_idle()
    stats = driven.stats
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 20 and stats.num_preemptions > 0
    plain.executor.close()
    driven.executor.close()


def check_draft_engine(engine: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The engine as its own draft engine: answers are those without drafts, and all drafts are accepted."""
    with LLM(engine, device="cpu", speculate=str(engine), draft_tokens=6, adaptive_drafts=False, max_num_tokens=24, num_threads=1) as llm:
        answers = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
        stats = llm.stats()
    assert [answer.choices[0].token_ids for answer in answers[: len(expected)]] == expected
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 100
