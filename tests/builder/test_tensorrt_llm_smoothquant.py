"""SmoothQuant checkpoints of convert_checkpoint.py compute what TensorRT-LLM does with them, in float64 from its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smoothquant_files import ALGORITHMS, HEADS, Checkpoint, write_smoothquant

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.engine.reader import Engine
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.smoothquant import SmoothQuant

GROUPED = HEADS // 2


def built(checkpoint: Checkpoint, out: Path) -> Engine:
    return build(checkpoint.path, out, BuildConfig(device="cpu", dtype="float32"), verify="files")


def likelihoods(engine: Engine, checkpoint: Checkpoint) -> tuple[float, float]:
    """The negative log likelihood of 40 tokens: (of the engine, of the model with the linears of TensorRT-LLM)."""
    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(2))
    found = LayerwiseModel(engine.config.model, split_windows(ids.tolist(), 40)).run(engine.loader())
    logits = checkpoint.model(ids[None]).logits[0, :-1].detach()
    return found.nll, float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("per_channel", "per_token"), ALGORITHMS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_engine_computes_what_tensorrt_llm_does(per_channel: bool, per_token: bool, bias: bool, tp: int, tmp_path: Path) -> None:
    folded = ("attention.dense", "mlp.proj")
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=per_channel, per_token=per_token, tp=tp, bias=bias, folded=folded)
    engine = built(checkpoint, tmp_path / "engine")
    assert engine.config.recipe.default == SmoothQuant(per_token=per_token)
    assert set(engine.config.recipe.overrides.values()) <= {Dense()}
    assert not any("layers" in name for name in engine.config.recipe.overrides)
    found, expected = likelihoods(engine, checkpoint)
    assert found == pytest.approx(expected, rel=1e-6)
    for linear in checkpoint.linears.values():
        linear.rounds = False
    assert abs(likelihoods(engine, checkpoint)[1] - expected) > 5 * abs(found - expected), "the rounding of inputs has an effect"


@pytest.mark.parametrize("per_token", [False, True])
def test_values_are_those_of_the_checkpoint(per_token: bool, tmp_path: Path) -> None:
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=True, per_token=per_token, folded=("attention.dense", "mlp.proj"))
    stored = load_file(built(checkpoint, tmp_path / "engine").path / "rank0.safetensors")
    linears = {name: linear.tensors for name, linear in checkpoint.linears.items()}
    qkv, gate, up, down = (linears[f"1.{name}"] for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    assert torch.equal(stored["layers.1.attention.qkv.weight"].double(), qkv["weight"])
    assert torch.equal(stored["layers.1.mlp.up.weight"].double(), torch.cat((gate["weight"], up["weight"])))
    scales = [
        part["per_channel_scale"][0] * (1 if per_token else part["act_scale"][0] * part["factor"]) for part in (gate, up, down)
    ]  # fmt: skip
    scales[1] /= down["smoother"][0]
    torch.testing.assert_close(stored["layers.1.mlp.up.scale"].double(), torch.cat(scales[:2]), rtol=1e-6, atol=0)
    torch.testing.assert_close(stored["layers.1.mlp.down.scale"].double(), scales[2], rtol=1e-6, atol=0)
    if not per_token:
        torch.testing.assert_close(stored["layers.1.mlp.down.input_scale"].double(), 1 / down["factor"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_smoother_of_grouped_heads_stays_in_the_weight(per_token: bool, tmp_path: Path) -> None:
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=True, per_token=per_token, kv_heads=GROUPED, tp=2, folded=("mlp.proj",))
    engine = built(checkpoint, tmp_path / "engine")
    assert engine.config.recipe.overrides["layers.1.attention.out"] == Dense()
    found, expected = likelihoods(engine, checkpoint)
    assert found == pytest.approx(expected, rel=1e-6)


def test_weights_that_were_rounded_to_0_are_refused(tmp_path: Path) -> None:
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=False, per_token=True, kv_heads=GROUPED)
    with pytest.raises(CheckpointError, match=r"attention\.qkv\.weight has values up to \d+ of 127.*Convert with --per_channel"):
        built(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.fc.per_channel_scale", torch.ones(2, 96), r"fc\.per_channel_scale \[2, 96\] torch\.float32 is not 96 numbers"),
        ("mlp.fc.act_scale", torch.ones(3), r"fc\.act_scale \[3\] torch\.float32 is not one number"),
        ("post_layernorm.scale_to_int", torch.ones(2), r"scale_to_int \[2\] torch\.float32 is not one number"),
    ],
)
def test_scales_that_do_not_fit_are_rejected(name: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=True, per_token=False)
    path = checkpoint.path / "rank0.safetensors"
    save_file(load_file(path) | {f"transformer.layers.1.{name}": tensor}, path)
    with pytest.raises(CheckpointError, match=message):
        built(checkpoint, tmp_path / "engine")


def test_a_missing_quantizing_factor_is_reported(tmp_path: Path) -> None:
    checkpoint = write_smoothquant(tmp_path / "trt", per_channel=True, per_token=False)
    path = checkpoint.path / "rank0.safetensors"
    tensors = load_file(path)
    del tensors["transformer.layers.1.post_layernorm.scale_to_int"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.post_layernorm\.scale_to_int is missing"):
        built(checkpoint, tmp_path / "engine")
