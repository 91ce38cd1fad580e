"""Steps of one token cut into attentions and tails: the same sums as layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, FIRST
from harness import Harness

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.layers.layer import Layer
from stoker.layers.tail import Tails

PROMPT = [7, 3, 11, 5, 2]


def harness(row: str, folder: Path, tokenizer: Path, quantization: str = "NO_QUANT") -> Harness:
    reference = CASES[FIRST[row]]()
    reference.save(folder / "hf")
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=2, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, quantization=quantization)
    build(folder / "hf", folder / "engine", config, verify="none")
    return Harness(folder / "engine", 64)


def decoded(model: Harness) -> list[torch.Tensor]:
    """The logits of four steps of one token after a prompt."""
    sequence = model.start(list(PROMPT))
    model.step([(sequence, len(PROMPT))])
    for _ in range(4):
        model.step([(sequence, 1)])
    return [sequence.logits[i] for i in sorted(sequence.logits)]


@pytest.mark.parametrize(
    ("row", "quantization"), [("LlamaForCausalLM", "NO_QUANT"), ("Qwen2ForCausalLM", "WEIGHTS_ONLY_INT8"), ("GemmaForCausalLM", "FP8")]
)
def test_tails_are_the_layers(row: str, quantization: str, tmp_path: Path, tokenizer: Path) -> None:
    model = harness(row, tmp_path, tokenizer, quantization)
    layers: list[Layer] = model.model.layers
    assert model.model.tails is None, "on a CPU a tail is no faster"
    whole = decoded(model)
    model.model.tails = tails = Tails(layers)
    assert [tail.qkv is None for tail in tails.tails] == [False] * (len(layers) - 1) + [True]
    for mine, theirs in zip(decoded(model), whole, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "row", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "FalconForCausalLM", "MixtralForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_layers_of_other_kinds_have_no_tails(row: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.ops.takes_tail", lambda tail: True)
    assert harness(row, tmp_path, tokenizer).model.tails is None
