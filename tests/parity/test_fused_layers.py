"""Steps that run in fused layers compute exactly what the separate layers do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, FIRST
from harness import Harness

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.layers.fused_layer import FusedLayers
from stoker.layers.layer import Layer

PROMPT = [7, 3, 11, 5, 2]


def harness(row: str, folder: Path, tokenizer: Path, quantization: str = "NO_QUANT") -> Harness:
    reference = CASES[FIRST[row]]()
    reference.save(folder / "hf")
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=2, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, quantization=quantization)
    build(folder / "hf", folder / "engine", config, verify="none")
    return Harness(folder / "engine", 64)


def decoded(model: Harness) -> list[torch.Tensor]:
    """The logits of a prompt and of four decode steps."""
    sequence = model.start(list(PROMPT))
    model.step([(sequence, len(PROMPT))])
    for _ in range(4):
        model.step([(sequence, 1)])
    return [sequence.logits[i] for i in sorted(sequence.logits)]


@pytest.mark.parametrize(
    ("row", "quantization"), [("LlamaForCausalLM", "NO_QUANT"), ("Qwen2ForCausalLM", "WEIGHTS_ONLY_INT8"), ("GemmaForCausalLM", "FP8")]
)
@pytest.mark.parametrize("supported", [(1,), (len(PROMPT),), (1, len(PROMPT))], ids=str)
def test_fused_layers_equal_the_layers(
    row: str, quantization: str, supported: tuple[int, ...], tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model = harness(row, tmp_path, tokenizer, quantization)
    layers: list[Layer] = model.model.layers
    model.model.fused_layers = None
    expected, steps = decoded(model), []
    monkeypatch.setattr("stoker.kernels.ops.supports_fused_layer", lambda layer, rows: rows in supported)
    model.model.fused_layers = fused = FusedLayers(layers)
    original = FusedLayers.__call__

    def counted(self: FusedLayers, x: torch.Tensor, *rest: object) -> torch.Tensor:
        steps.append(len(x))
        return original(self, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    assert [layer.qkv is None for layer in fused.layers] == [False] * (len(layers) - 1) + [True]
    for logits, separate in zip(decoded(model), expected, strict=True):
        assert torch.equal(logits, separate)
    assert steps == [rows for rows in (len(PROMPT), 1, 1, 1, 1) if rows in supported]


@pytest.mark.parametrize(("supported", "exist", "before"), [((1, 32), True, True), ((32,), True, False), ((5,), False, False)])
def test_fused_layers_exist_where_one_row_or_several_are_supported(
    supported: tuple[int, ...], exist: bool, before: bool, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.kernels.ops.supports_fused_layer", lambda layer, rows: rows in supported)
    model = harness("LlamaForCausalLM", tmp_path, tokenizer).model
    assert (model.fused_layers is not None) == exist
    assert not any(layer.attention.params.before_fused_layer for layer in model.layers)
    if model.fused_layers is not None:
        assert all(params.before_fused_layer == before for params in model.fused_layers.params)


@pytest.mark.parametrize(
    "row", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "FalconForCausalLM", "MixtralForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_layers_of_other_kinds_have_no_fused_layers(row: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.ops.supports_fused_layer", lambda layer, rows: True)
    assert harness(row, tmp_path, tokenizer).model.fused_layers is None
