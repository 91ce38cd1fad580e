"""The build compares the language model of a multimodal checkpoint with transformers, as it does for other checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import CASES, FIRST

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig


@pytest.mark.parametrize("row", ["Mistral3ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_greedy_tokens_are_compared(row: str, tmp_path: Path, letters: Path) -> None:
    CASES[FIRST[row]]().save(tmp_path / "hf")
    limits = Limits(max_input_len=64, max_output_len=64, max_num_tokens=128, max_batch_size=4, tokens_per_block=16)
    build(tmp_path / "hf", tmp_path / "engine", BuildConfig(tokenizer=str(letters), device="cpu", dtype="float32", limits=limits))
    greedy = json.loads((tmp_path / "engine" / "config.json").read_text())["checks"]["greedy"]
    assert greedy["tokens"] == greedy["equal"] == 32 and not greedy["skipped"]
