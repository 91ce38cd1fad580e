"""Every row of the table, from a checkpoint in its own layout through the build to logits, against an independent reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES
from harness import Harness, alone, crowded
from oracles import Reference

from stoker import LLM
from stoker.base.config import Limits
from stoker.base.types import SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.models import all_architectures

NUM_NEW = 64
TOLERANCE = 2e-4


def test_every_row_is_proven() -> None:
    assert {row.name for row in all_architectures()} == {row for row, _ in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].replace(' ', '_')}")
def test_answers_like_the_reference(case: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
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
    prompt, strangers = prompts(reference, harness)

    close(alone(harness, prompt), reference.logits(prompt, len(prompt)))
    main = crowded(harness, prompt, strangers, NUM_NEW)
    expected = reference.logits(main.tokens[:-1], len(prompt))
    close(torch.stack([main.logits[i] for i in range(len(main.tokens) - 1)]), expected)
    assert main.tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
    if not harness.config.requires_whole_prompt:
        reused(harness, reference, prompt, main)
    served(tmp_path / "engine", reference, [prompt, *strangers], harness.config.requires_whole_prompt)


def reused(harness: Harness, reference: Reference, prompt: list[int], main: object) -> None:
    """A prompt that begins like one that was computed takes its blocks over."""
    again = harness.start([*prompt[:18], 5, 6, 7], share=main)  # type: ignore[arg-type]
    assert again.computed == 16
    harness.step([(again, 5)])
    close(torch.stack([again.logits[i] for i in range(16, 21)]), reference.logits(again.tokens[:-1], 21)[16:])


def served(engine: Path, reference: Reference, asked: list[list[int]], whole: bool, device: str = "cpu") -> None:
    """The same through the executor, with a cache too small for all sequences, and steps too small for a prompt unless it must be whole."""
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        engine, device=device, policy="max_utilization", max_num_tokens=40 if whole else 16, kv_cache_tokens=14 * 16, num_threads=1
    ) as llm:
        answers = llm.generate(asked, params)
        later = llm.generate([*asked[2][:33], *(asked[2][-2:] if whole else [4])], params)  # two blocks of a prompt that came before
        stats = llm.stats()
    assert stats.num_preemptions > 0 and (stats.num_reused_tokens > 0) == (not whole)
    for answer in [*answers, later]:
        tokens = answer.choices[0].token_ids
        whole = [*answer.prompt_token_ids, *tokens]
        first = len(answer.prompt_token_ids) - 1
        assert list(tokens) == reference.logits(whole[:-1], first + 1)[first:].argmax(-1).tolist()


def prompts(reference: Reference, harness: Harness) -> tuple[list[int], list[list[int]]]:
    """A prompt and two strangers; prefix models get a mask and a start token at the end of each."""
    generator = torch.Generator().manual_seed(1)
    lengths = (21, 5, 38)
    made = [torch.randint(3, min(reference.vocab, 90), (n,), generator=generator).tolist() for n in lengths]
    prefix = harness.config.prefix
    if prefix is not None:
        mask = 98
        assert mask in prefix.mask_ids
        made = [[*ids[:-2], mask, prefix.start_id] for ids in made]
    return made[0], made[1:]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.3, "the reference says nothing"
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error:.2e}"
