"""Checkpoints stored in FP8 blocks (DeepSeek V3) and MXFP4 (gpt-oss) are compared with their dequantized weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from cases import GROUPED, MLA
from harness import Harness, prefill_logits
from oracles import hf_logits, hf_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.export.hugging_face import export_hugging_face
from stoker.builder.prequantized.dequantize import dequantize
from stoker.builder.prequantized.fp4 import mxfp4_tensors
from stoker.engine.reader import Engine
from stoker.quant.formats.fp4 import Fp4

PROMPT = list(range(3, 40))
BLOCK = (16, 8)  # the sizes of the tiny model are not multiples of it


def fp8_blocks(path: Path, block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """Store every matrix of a saved checkpoint in blocks, as DeepSeek does. Returns the dequantized weights."""
    tensors, dequantized = load_file(path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "proj" not in name:
            continue
        rows, columns = (math.ceil(size / side) for size, side in zip(weight.shape, block, strict=True))
        stored, scale = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        dequantized[name] = torch.empty(weight.shape)
        for r in range(rows):
            for c in range(columns):
                where = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
                scale[r, c] = weight[where].abs().max() / 448
                stored[where] = (weight[where] / scale[r, c]).to(torch.float8_e4m3fn)
                dequantized[name][where] = stored[where].float() * scale[r, c]
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scale
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    (path / "config.json").write_text(json.dumps(config))
    return dequantized


def logits(path: Path, tokenizer: Path, quantization: str | None = None) -> torch.Tensor:
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", quantization=quantization)
    build(path, path / "engine", settings, verify="none")
    return prefill_logits(Harness(path / "engine", 256), PROMPT)


def test_fp8_blocks_are_dequantized_without_quantization(tmp_path: Path, tokenizer: Path) -> None:
    model = hf_model("DeepseekV3", **MLA, n_group=4, topk_group=2)
    model.save_pretrained(tmp_path)
    dequantized = fp8_blocks(tmp_path)
    found = logits(tmp_path, tokenizer, "NO_QUANT")

    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    save_file(load_file(plain / "model.safetensors") | dequantized, plain / "model.safetensors")
    reference = type(model).from_pretrained(plain, attn_implementation="eager").float()
    assert (found - hf_logits(reference)(PROMPT, 0)).abs().max() < 2e-4
    assert (found - hf_logits(model)(PROMPT, 0)).abs().max() > 1e-3, "the rounding changes the logits, so the dequantized weights were used"


def mxfp4_experts(path: Path) -> PreTrainedModel:
    """Save a checkpoint of gpt-oss with random MXFP4 experts. Returns the model with their values."""
    sizes = GROUPED | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    model = hf_model("GptOss", **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=9)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inner, out = weight.shape
            blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, (experts, out, inner // 32), dtype=torch.uint8, generator=generator)
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales))
            stem = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[stem]
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model


@pytest.mark.parametrize("quantization", [None, "NO_QUANT"])
def test_mxfp4_experts(tmp_path: Path, tokenizer: Path, quantization: str | None) -> None:
    model = mxfp4_experts(tmp_path)
    assert (logits(tmp_path, tokenizer, quantization) - hf_logits(model)(PROMPT, 0)).abs().max() < 2e-4
    stored = Engine.open(tmp_path / "engine").config.recipe.default
    assert (stored == Fp4()) == (quantization is None)


def test_shards_of_mxfp4_experts(tmp_path: Path, tokenizer: Path) -> None:
    """Ranks have two and one of the three groups of 96 features of an expert. The export merges them."""
    model = mxfp4_experts(tmp_path)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", mapping=Mapping(tensor_parallel=2))
    engine = build(tmp_path, tmp_path / "engine", settings, verify="none")
    assert engine.config.recipe.default == Fp4() and engine.world_size == 2
    export_hugging_face(engine.path, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(exported[f"model.layers.{i}.mlp.experts.{name}"], getattr(layer.mlp.experts, name))


def test_every_fp4_value_and_every_scale_is_exact() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(16, 1).view(256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].clamp(max=250)  # 6 × 2 ** 124 is the largest value that transformers can store
    found = dequantize(Fp4(), mxfp4_tensors("weight", blocks.flatten(1), scales))
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T  # [in, out] in a checkpoint
    assert torch.equal(found, expected)
    with pytest.raises(CheckpointError, match="weight has a scale that is NaN"):
        mxfp4_tensors("weight", blocks.flatten(1), torch.full((256, 1), 255, dtype=torch.uint8))


def test_missing_and_misshapen_scales_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    hf_model("DeepseekV3", **MLA, n_group=4, topk_group=2).save_pretrained(tmp_path)
    fp8_blocks(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    save_file({k: t for k, t in tensors.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is missing, and .* needs it"):
        logits(tmp_path, tokenizer)
    save_file(tensors | {name: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[2, 2\].*implies \[3, 5\]"):
        logits(tmp_path, tokenizer)
