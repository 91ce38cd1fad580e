"""Every row of the table in eight bits: the same reference, within what rounding the weights to eight bits costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, FIRST
from harness import Harness, alone
from test_parity import prompts

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

# Relative error of all logits. Random weights of width 48: 0.01 to 0.03, and 0.11 where a rounded score sends a token to another expert.
TOLERANCE = 0.15


@pytest.mark.parametrize("row", FIRST)
def test_eight_bit_weights(row: str, tmp_path: Path, tokenizer: Path) -> None:
    reference = CASES[FIRST[row]]()
    reference.save(tmp_path / "hf")
    limits = Limits(max_input_len=128, max_output_len=128, max_num_tokens=512, max_batch_size=8, tokens_per_block=16)
    asked = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", quantization="WEIGHTS_ONLY_INT8", limits=limits)
    engine = build(tmp_path / "hf", tmp_path / "engine", asked, verify="none")
    assert engine.config.recipe.name == "WEIGHTS_ONLY_INT8"
    harness = Harness(engine.path, reference.positions)
    prompt, _ = prompts(reference, harness)
    expected = reference.logits(prompt, len(prompt)).double()
    error = (alone(harness, prompt).double() - expected).norm() / expected.norm()
    assert 1e-4 < error < TOLERANCE, "below: nothing was rounded"
