"""HQQ checkpoints: the `hqq` package packs them and computes the real weights; without it, the formulas of its source do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_prequantized_import import PROJECTIONS, SIZES, check_weights
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.layers.decoder import declare
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8_grouped import GroupedInt8

PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


def text(value: str) -> Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def hqq(weight: Tensor, bits: int, group: int, axis: int, as_float: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a module of `HQQLinear.state_dict()` with float16 scales, and the real weight [out, in]."""
    matrix = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
    low, high = matrix.amin(axis, keepdim=True), matrix.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).half()
    values = (matrix / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
    per_word = PER_WORD[bits]
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % per_word)).long()
    words = sum(part << bits * (per_word - 1 - i) for i, part in enumerate(padded.chunk(per_word)))
    packed = words.to(torch.int32 if bits == 3 else torch.uint8)
    flags = {"view_as_float": as_float, "quant_scale": False, "quant_zero": False, "offload_meta": False, "encoded_state_dict": True}
    flags |= {"stores_quant_config": True, "channel_wise": True, "optimize": True, "round_zero": bits == 4}
    stored = {
        "W_q": packed.view(torch.float16) if as_float else packed, "scale": scale, "zero": zero,
        "shape": torch.tensor(weight.shape), "packing": text("3bit_32" if bits == 3 else f"{bits}bit_u8"),
        "unpack_view_dtype": text("torch.int32" if bits == 3 else "torch.uint8"), "compute_dtype": text("torch.float16"),
        "nbits": torch.tensor(bits, dtype=torch.int32), "group_size": torch.tensor(group, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
    } | {name: torch.tensor(int(value), dtype=torch.uint8) for name, value in flags.items()}  # fmt: skip
    return stored, ((values - zero.float()) * scale.float()).reshape(weight.shape)


def library(weight: Tensor, bits: int, group: int, axis: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same as `hqq` by the library itself, with its search for scales and zero points."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    module = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}, module.dequantize()


def settings(bits: int, group: int, axis: int, as_float: bool = False) -> dict[str, Any]:
    """quantization_config as transformers saves it."""
    weight = {
        "nbits": bits, "channel_wise": True, "group_size": group, "optimize": True, "round_zero": bits == 4, "axis": axis,
        "view_as_float": as_float,
    }  # fmt: skip
    config = {"weight_quant_params": weight, "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
    return {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}


def checkpoint_of(path: Path, pack: Any, quantization: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    source = tiny.save(tiny.model(**SIZES), path)
    tensors, weights = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS]:
        parts, weights[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return source, weights


@pytest.mark.parametrize(
    ("bits", "group", "axis", "as_float", "expected"),
    [
        (4, 32, 1, False, Int4(group_size=32, zero="float", scale_dtype="float32", clip=False)),
        (4, 16, 1, True, Int4(group_size=16, zero="float", scale_dtype="float32", clip=False)),
        (8, 32, 1, False, GroupedInt8(group_size=32, shifted=True)),
        (3, 16, 1, False, Int4(group_size=16, zero="float", scale_dtype="float32", clip=False)),
        (2, 16, 1, False, Int4(group_size=16, zero="float", scale_dtype="float32", clip=False)),
        (1, 8, 1, False, Dense()),  # no supported group divides eight features
        (4, 64, 1, False, Dense()),  # groups of down_proj, which has 96 input features, span two rows
        (4, 16, 0, False, Dense()),
        (3, 16, 0, False, Dense()),
        (8, 16, 0, True, Dense()),
    ],
)  # fmt: skip
def test_values_do_not_change(bits: int, group: int, axis: int, as_float: bool, expected: object, tmp_path: Path) -> None:
    source, weights = checkpoint_of(tmp_path / "hf", lambda w: hqq(w, bits, group, axis, as_float), settings(bits, group, axis, as_float))
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    check_weights(engine, weights)
    assert engine.config.recipe.format_for(declare(engine.config.model)["layers.1.mlp.down"]) == expected


@pytest.mark.parametrize(("bits", "axis"), [(4, 1), (8, 1), (3, 0)])
def test_weights_are_those_of_the_library(bits: int, axis: int, tmp_path: Path) -> None:
    pytest.importorskip("hqq")
    source, weights = checkpoint_of(tmp_path / "hf", lambda w: library(w, bits, 16, axis), settings(bits, 16, axis))
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    check_weights(engine, weights)


def test_modules_with_settings_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = settings(4, 16, 1) | {"quant_config": {"self_attn.q_proj": settings(8, 32, 1)["quant_config"], "mlp.up_proj": None}}
    source, weights = checkpoint_of(tmp_path / "hf", lambda w: hqq(w, *((8, 32, 1) if w.shape == (64, 64) else (4, 16, 0))), own)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    check_weights(engine, weights)
    assert "weights are stored as float32" in caplog.text and "No value changes" in caplog.text


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("packing", text("5bit_u8"), "packing is '5bit_u8', which is not supported. Supported: 8bit_u8, 4bit_u8, "),
        ("packing", torch.zeros(1 << 16, dtype=torch.uint8), "packing.* is not a short text"),
        ("axis", torch.tensor(2), r"axis is 2. Supported: 0 and 1"),
        ("axis", torch.tensor(1.0), r"axis \[\] is not 1 integers"),
        ("group_size", torch.tensor(7), r"group_size is 7, which does not divide a weight of shape \[64, 96\]"),
        ("group_size", torch.tensor(0), "group_size is 0"),
        ("shape", torch.tensor([1 << 40, 2]), "group_size is 16"),
        ("quant_zero", torch.tensor(1), "quant_zero is not 0"),
        ("scale", torch.ones(3, 1), r"scale has shape \[3, 1\]"),
        ("W_q", torch.zeros(3, 16, dtype=torch.uint8), r"W_q has shape \[3, 16\]"),
        ("zero", None, "zero is missing"),
        ("meta_scale", torch.ones(1), "meta_scale"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(suffix: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", lambda w: hqq(w, 4, 16, 1), settings(4, 16, 1))
    tensors, name = load_file(source / "model.safetensors"), f"model.layers.1.mlp.down_proj.{suffix}"
    others = {key: value for key, value in tensors.items() if key != name}
    save_file(others if tensor is None else others | {name: tensor}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotation": 1}, "rotation='1' is not known"),
        ({"quant_config": {"weight_quant_params": {"nbits": 4, "sign": 1}}}, r"quant_config\.weight_quant_params\.sign='1' is not known"),
        (
            {"quant_config": {"weight_quant_params": {}, "zero_quant_params": {"nbits": 8}}},
            r"quant_config\.zero_quant_params=.*not supported",
        ),
        ({"quant_config": {"self_attn.q_proj": {"bits": 4}}}, r"quant_config\.self_attn\.q_proj\.bits='4' is not known"),
        ({"quant_config": [4]}, r"quant_config=\[4\] is not an object"),
    ],
)
def test_unknown_settings_are_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", lambda w: hqq(w, 4, 16, 1), settings(4, 16, 1) | change)
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))
