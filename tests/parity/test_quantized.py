"""Every row of the architecture table in every quantization: logits are within a bound of the reference, or the build is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, FIRST
from harness import Harness, prefill_logits
from proof import make_prompts

from stoker.base.config import Limits
from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.quant.named_recipes import RECIPES

# Bound of the relative error of all logits, and settings for the narrow test models. Measured with random weights of width 48: 0.01 to 0.03
# in int8, and 0.11 where rounding sends a token to another expert; 0.06 to 0.33 in 4 bits, where calibration on 128 tokens of other text
# does not help. A scale or a folding in a wrong place results in 0.5 or more.
GROUPS = {"group_size": 16}
BOUNDS: dict[str, tuple[float, dict[str, int]]] = {
    "WEIGHTS_ONLY_INT8": (0.15, {}),
    "WEIGHTS_KV_INT8": (0.2, {}),
    "WEIGHTS_ONLY_INT4": (0.4, GROUPS),
    "WEIGHTS_KV_INT4": (0.4, GROUPS),
    "AWQ": (0.48, GROUPS),
    "GPTQ": (0.48, GROUPS),
    "SMOOTH_QUANT": (0.15, {}),
    "FP8": (0.25, {}),
    "FP8_KV": (0.28, {}),
    "FP8_BLOCK": (0.3, {"rows": 4, "columns": 8}),
}
# Each is a part of another recipe, or combines two others: their formats and the quantized KV cache are tested with those for every row,
# and by themselves for one row in four.
COMBINATIONS = {"WEIGHTS_ONLY_INT8", "WEIGHTS_KV_INT4", "FP8"}
CALIBRATED = set(BOUNDS) - {"WEIGHTS_ONLY_INT8", "WEIGHTS_ONLY_INT4", "FP8", "FP8_BLOCK"}


def test_every_quantization_has_a_bound() -> None:
    assert {*BOUNDS, "NO_QUANT"} == set(RECIPES)


@pytest.mark.parametrize("row", FIRST)
def test_quantized_logits_are_near_the_reference(row: str, tmp_path: Path, letters: Path) -> None:
    reference = CASES[FIRST[row]]()
    reference.save(tmp_path / "hf")
    limits = Limits(max_input_len=128, max_output_len=128, max_num_tokens=512, max_batch_size=8, tokens_per_block=16)
    for recipe, (bound, format_settings) in BOUNDS.items():
        is_prefix_lm = row in ("GLMModel", "ChatGLM1Model")  # which has no calibrated recipe that contains the others
        if recipe in COMBINATIONS and not is_prefix_lm and list(FIRST).index(row) % 4:
            continue
        settings = BuildConfig(
            tokenizer=str(letters),
            device="cpu",
            dtype="float32",
            limits=limits,
            quantization=recipe,
            quantization_settings=format_settings,
            calibration_size=4,
            calibration_seq_len=32,
        )
        if is_prefix_lm and recipe in CALIBRATED:
            with pytest.raises(ConfigError, match=rf"^{recipe} .*is refused: it is calibrated on text, and {row} is a prefix LM"):
                build(tmp_path / "hf", tmp_path / recipe, settings, verify="none")
            continue
        engine = build(tmp_path / "hf", tmp_path / recipe, settings, verify="none")
        assert engine.config.recipe.name == recipe
        harness = Harness(engine.path, reference.positions)
        prompt, _ = make_prompts(reference, harness)
        expected = reference.logits(prompt, len(prompt)).double()
        error = (prefill_logits(harness, prompt).double() - expected).norm() / expected.norm()
        if harness.config.has_state:  # errors accumulate in the state, and the norm after it amplifies them
            bound *= 2
        assert 1e-4 < error < bound, f"{recipe}; an error below 1e-4 means that nothing was quantized"
