"""Every family of TensorRT-LLM with every quantization that its converters or ModelOpt write: the logits of the dequantized model."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, prefill_logits
from oracles import Reference
from safetensors.torch import load_file, save_file
from tensorrt_llm_quantizer import QUANTIZERS, quantize_rank
from tensorrt_llm_writer import write_tensorrt_llm
from test_tensorrt_llm_architectures import CASES, LIMITS
from torch import Tensor

from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.quant.formats.dense import Dense

# The order of a GPU needs multiples of 32 input features.
SIZES = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 128, "ffn_dim": 256, "ffn_hidden_size": 128, "n_inner": 128,
    "moe_intermediate_size": 64, "word_embed_proj_dim": 64, "v_head_dim": 16, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
}  # fmt: skip
HEADS = ("num_attention_heads", "n_head", "n_heads")
WITHOUT_LINEARS = ("MambaForCausalLM",)  # its converter does not quantize
# Families of convert_checkpoint.py that have GPTQ and SmoothQuant.
GPTQ = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "BaichuanForCausalLM", "QWenForCausalLM", "GPTNeoXForCausalLM")
SMOOTHQUANT = (
    *GPTQ[:-1], "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "BloomForCausalLM", "ChatGLMForCausalLM", "GemmaForCausalLM", "MptForCausalLM",
)  # fmt: skip
ROUNDS_INPUTS = ("FP8", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")
STACKED = ("GraniteMoeForCausalLM",)  # whose experts are read unquantized only
PROMPT = torch.randint(3, 90, (17,), generator=torch.Generator().manual_seed(1)).tolist()


def algorithms(name: str) -> list[str]:
    """The quantizations of a family."""
    found = [] if name in WITHOUT_LINEARS else ["FP8", "W8A16", "W4A16", "W4A16_AWQ"]
    return found + ["W4A16_GPTQ"] * (name in GPTQ) + ["W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"] * (name in SMOOTHQUANT)


def enlarged(make: Any) -> Reference:
    """The reference of a case with sizes that can be in the order of a GPU."""
    given = make.keywords if isinstance(make, partial) else {}
    changes: dict[str, Any] = {key: size for key, size in SIZES.items() if key in given}
    if not given.get("hidden_size") and not {"n_embd", "d_model"} & {*given}:
        changes |= {"hidden_size": 64, "intermediate_size": 128}
    if not given:  # DeepSeek MoE
        changes |= {"num_attention_heads": 8, "moe_intermediate_size": 64}
    if "q_lora_rank" not in given:
        for key in HEADS:
            if key in given:
                changes |= {key: 8} | ({"num_key_value_heads": 8} if given.get("num_key_value_heads") == given[key] else {})
    return make(**changes)


def logits(source: Path, out: Path, tokenizer: Path, quantization: str | None = None) -> tuple[Tensor, bool]:
    """(the logits of an engine of a checkpoint, whether a linear is quantized)."""
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS, quantization=quantization)
    engine = build(source, out, settings, verify="none")
    recipe = engine.config.recipe
    return prefill_logits(Harness(out, 256), PROMPT).double(), {recipe.default, *recipe.overrides.values()} != {Dense()}


def difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of the expected logits. Integer weights are multiplied by inputs of about 15 bits."""
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The unquantized checkpoints of one rank, by case. Filled by the tests."""
    return {}


PAIRS = [(case, algorithm) for case in CASES for algorithm in algorithms(CASES[case][1].architecture)]


def test_each_quantization_is_proven() -> None:
    assert {algorithm for _, algorithm in PAIRS} == {*QUANTIZERS}


@pytest.mark.parametrize(
    ("case", "algorithm"), PAIRS, ids=lambda value: "_".join(value).replace(" ", "_") if isinstance(value, tuple) else value
)
def test_logits_equal_those_of_the_dequantized_model(
    case: tuple[str, str], algorithm: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: Path,
    written: dict[tuple[str, str], Path],
) -> None:  # fmt: skip
    make, conversion = CASES[case]
    if case not in written:
        folder = tmp_path_factory.mktemp("plain")
        enlarged(make).save(folder / "hf")
        written[case] = write_tensorrt_llm(folder / "trt", folder / "hf", dataclasses.replace(conversion, tp=1))
    plain, config = tmp_path / "plain", json.loads((written[case] / "config.json").read_text())
    stored, dequantized = quantize_rank(
        load_file(written[case] / "rank0.safetensors"), algorithm, conversion.architecture not in STACKED and "AWQ" not in algorithm
    )
    for path, tensors in ((plain, dequantized), (tmp_path / "trt", stored)):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "rank0.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": algorithm, "group_size": 32 if "AWQ" in algorithm else 64, "has_zero_point": "GPTQ" in algorithm}
    (tmp_path / "trt" / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    expected, _ = logits(plain, tmp_path / "plain_engine", tokenizer)
    found, is_quantized = logits(tmp_path / "trt", tmp_path / "engine", tokenizer)
    assert is_quantized
    assert expected.abs().max() > 0.3
    if algorithm not in ROUNDS_INPUTS:
        assert difference(found, expected) <= 1e-3
        return
    assert difference(found, expected) <= 0.5
    unrounded, is_quantized = logits(tmp_path / "trt", tmp_path / "plain_numbers", tokenizer, "NO_QUANT")
    assert not is_quantized
    assert difference(unrounded, expected) <= 1e-4
