"""Integers of TensorRT-LLM checkpoints in the order of a GPU: weight-only int8 and int4, GPTQ, and quantized experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorrt_llm_files import GPUS, converted, order_for_gpu

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint.tensorrt_llm.gpu_order import decode_integers
from stoker.builder.config import BuildConfig
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.quant.format import Format
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 64, 64), (256, 96, 256), (512, 128, 64), (512, 128, 128), (4096, 64, 4096)])
@pytest.mark.parametrize("has_zero", [False, True])
def test_each_order_of_values_is_undone(gpu: str, bits: int, rows: int, columns: int, group: int, has_zero: bool) -> None:
    weight = torch.randn(rows // group, group, columns, generator=torch.Generator().manual_seed(rows + columns)) + 0.2 * has_zero
    half = 1 << (bits - 1)
    low, high = (weight.amin(1), weight.amax(1)) if has_zero else (-weight.abs().amax(1), weight.abs().amax(1))
    scale = (high - low) / (2 * half - has_zero)
    zero = low + scale * half
    values = ((weight - zero[:, None]) / scale[:, None]).round().clamp(-half, half - 1).to(torch.int8).flatten(0, 1)
    stored = order_for_gpu(values, bits, gpu)
    assert stored.shape == (rows, columns * bits // 8)
    assert torch.equal(decode_integers("w", stored, bits, scale.T, zero.T if has_zero else None), values.T)


def test_values_that_show_no_order_are_rejected() -> None:
    values = torch.zeros(128, 64, dtype=torch.int8)
    values[:64] = torch.tensor([1, -1], dtype=torch.int8).repeat(32)[:, None]
    with pytest.raises(CheckpointError, match="w does not show for which GPU its values are ordered"):
        decode_integers("w", order_for_gpu(values, 4, "ampere"), 4, torch.zeros(64, 1), None)
    with pytest.raises(CheckpointError, match=r"w \[48, 64\] with scales \[64, 1\] is no weight that TensorRT-LLM orders"):
        decode_integers("w", torch.zeros(48, 32, dtype=torch.int8), 4, torch.ones(64, 1), None)


@pytest.mark.parametrize(
    ("kind", "algorithm", "gpu", "tp", "stored"),
    [
        ("llama", "W8A16", "hopper", 1, Int8()),
        ("llama", "W8A16", "ampere", 2, None),
        ("llama", "W4A16", "ampere", 2, Int4(group_size=128, zero="none", scale_dtype="float32", clip=False)),
        ("qwen2", "W4A16", "early hopper", 1, Int4(group_size=128, zero="none", scale_dtype="float32", clip=False)),
        ("llama", "W4A16_GPTQ", "ampere", 2, Int4(group_size=64, zero="int", scale_dtype="float16", clip=False)),
        ("qwen3", "W4A16_GPTQ", "hopper", 1, Int4(group_size=64, zero="int", scale_dtype="float16", clip=False)),
        ("llama", "W8A16_GPTQ", "ampere", 1, None),
        ("mixtral", "W8A16", "ampere", 1, Int8()),
        ("mixtral", "W4A16", "hopper", 2, Int4(group_size=128, zero="none", scale_dtype="float32", clip=False)),
        ("mixtral", "W4A16_GPTQ", "ampere", 2, Int4(group_size=64, zero="int", scale_dtype="float16", clip=False)),
        ("mixtral", "FP8", "hopper", 2, Fp8(weights="tensor", activations="static")),
        ("qwen2_moe", "W4A16", "hopper", 2, Int4(group_size=128, zero="none", scale_dtype="float32", clip=False)),
    ],
)
def test_quantized_checkpoints_give_the_dequantized_model(
    kind: str, algorithm: str, gpu: str, tp: int, stored: Format | None, tmp_path: Path
) -> None:
    own = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256} if kind == "qwen2_moe" else {}
    source, model = converted(tmp_path / "trt", kind, tp, algorithm=algorithm, gpu=gpu, sizes=SIZES | own, layers=2)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    formats = {engine.config.recipe.default, *engine.config.recipe.overrides.values()}
    assert stored is None or stored in formats
    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(2))
    found = LayerwiseModel(engine.config.model, split_windows(ids.tolist(), 40)).run(engine.loader())
    logits = model(ids[None]).logits[0, :-1].detach()
    expected = float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    # Static FP8 activations are rounded by the engine only.
    assert found.nll == pytest.approx(expected, rel=0.1 if algorithm == "FP8" else 1e-5)


def test_ranks_with_experts_of_their_own_are_merged(tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", "mixtral", 1)
    whole = load_file(source / "rank0.safetensors")
    divided, _ = converted(tmp_path / "divided", "mixtral", 2, mapping={"tp_size": 2, "moe_tp_size": 1, "moe_ep_size": 2})
    for rank in range(2):
        tensors = load_file(divided / f"rank{rank}.safetensors")
        tensors |= {name: t[2 * rank : 2 * rank + 2].clone() for name, t in whole.items() if ".mlp.fc." in name or ".mlp.proj." in name}
        save_file(tensors, divided / f"rank{rank}.safetensors")
    engines = [
        build(path, tmp_path / path.name / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
        for path in (source, divided)
    ]
    one, other = (load_file(engine.path / "rank0.safetensors") for engine in engines)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_zeros_that_are_no_zero_points_are_rejected(tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", algorithm="W4A16_GPTQ", sizes=SIZES, layers=1)
    tensors = load_file(source / "rank0.safetensors")
    tensors["transformer.layers.0.mlp.fc.zero"] *= 0.37
    save_file(tensors, source / "rank0.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_zero is not a multiple of its scale"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
