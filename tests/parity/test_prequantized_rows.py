"""Every row of the architecture table from a pre-quantized checkpoint: which linears keep their stored values, and the logits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from cases import CASES, FIRST
from harness import Harness, prefill_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.core.specs import LinearSpec
from stoker.layers.decoder import declare
from stoker.models import get_architecture
from stoker.quant.formats.int8 import Int8

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "matrix.py"))
METHOD = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
}
PROMPT = [5, 17, 3, 60, 8, 8, 41, 77, 2, 30, 11, 9]


def quantize(folder: Path, out: Path, plain: Path) -> set[str]:
    """Write the checkpoint with int8 weights in all modules of layers to `out`, and the same values unquantized to `plain`.

    Returns the names of the quantized weights.
    """
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    quantized = set()
    for name, tensor in tensors.items():
        is_layer = any(part.isdigit() for part in name.split("."))
        if not (is_layer and name.endswith(".weight") and tensor.dim() == 2 and ".gate.w" not in name and "router" not in name):
            stored[name] = rounded[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        values = (tensor / scale).round()
        stored |= {name: values.to(torch.int8), f"{name}_scale": scale}
        rounded[name] = values * scale
        quantized.add(name)
    for path, content, extra in ((out, stored, {"quantization_config": METHOD}), (plain, rounded, {})):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | extra))
    return quantized


def test_stored_values_do_not_change_where_the_matrix_says_so(saved: Path, tmp_path: Path) -> None:
    quantized = quantize(saved, tmp_path / "int8", tmp_path / "plain")
    plan = prepare(tmp_path / "int8", BuildConfig(device="cpu", dtype="float32"))
    model, recipe = plan.config.model, plan.config.recipe
    row = get_architecture(model.architecture)
    canonical = {row.canonical_name(name) for name in quantized}
    changed, unchanged = set(), set()
    for spec in declare(model).values():
        if not isinstance(spec, LinearSpec) or not spec.quantize:
            continue
        sources = {source for group in plan.tensor_plans[f"{spec.name}.weight"].sources for source in group}
        if sources <= canonical:
            (unchanged if recipe.format_for(spec) == Int8() else changed).add(".".join(spec.name.split(".")[2:]))
    assert changed == {name for name in MATRIX["dequantized_linears"](row, model) if "experts" not in name or name in changed}
    assert unchanged | changed


@pytest.mark.parametrize(
    "row", ["LlamaForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "PhimoeForCausalLM"]
)
def test_logits_are_those_of_the_dequantized_checkpoint(row: str, tmp_path: Path, tokenizer: Path) -> None:
    CASES[FIRST[row]]().save(tmp_path / "hf")
    assert quantize(tmp_path / "hf", tmp_path / "int8", tmp_path / "plain")
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=1, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    logits = []
    for name in ("int8", "plain"):
        build(tmp_path / name, tmp_path / f"{name}-engine", config, verify="none")
        logits.append(prefill_logits(Harness(tmp_path / f"{name}-engine", 64, num_blocks=4), PROMPT))
    assert (logits[0] - logits[1]).abs().max() < 1e-3
