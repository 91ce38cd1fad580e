"""A checkpoint that has an output head although config.json ties it to the embedding: transformers uses a head that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GROUPED
from harness import Harness, prefill_logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig, LlamaConfig

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

PROMPT = [5, 17, 3, 60, 8, 8, 41, 77, 2, 30]
GPTJ = {
    "vocab_size": 101,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "embedding"),
    [(LlamaConfig(**GROUPED), "model.embed_tokens.weight"), (GPTJConfig(**GPTJ), "transformer.wte.weight")],  # without and with a head bias
    ids=["llama", "gptj"],
)
@pytest.mark.parametrize("differs", [False, True])
def test_logits_equal_those_of_transformers(
    config: Any, embedding: str, differs: bool, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config.tie_word_embeddings, config.initializer_range = True, 0.2
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors[embedding].clone()
    if differs:
        tensors["lm_head.weight"][-1, -1] += 3.0
    save_file(tensors, file, metadata={"format": "pt"})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=1, tokens_per_block=16)
    build(
        tmp_path / "hf",
        tmp_path / "engine",
        BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits),
        verify="none",
    )
    found = prefill_logits(Harness(tmp_path / "engine", 64, num_blocks=4), PROMPT)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert (found - expected).abs().max() < 1e-4
    assert ("lm_head.weight differs" in caplog.text) == differs
