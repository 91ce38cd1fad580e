"""ModelOpt checkpoints, packed here as NVIDIA's exporter packs them, are imported without a change of values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_prequantized_import import PROJECTIONS, SIZES, Packed, blocks8, check_weights, rows8
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.smoothquant import SmoothQuant

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def signed_int4(weight: Tensor, group: int, first_scale_only: bool = False) -> Packed:
    """Two rows per byte: the even row in the low four bits, in two's complement."""
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(-1) / 7
    values = (groups / scale[..., None]).round().clamp(-8, 7)
    words = values.flatten(1).to(torch.int8) & 15
    stored = {"weight": (words[0::2] | (words[1::2] << 4)).view(torch.uint8), "weight_scale": scale}
    if not first_scale_only:
        stored |= {"weight_scale_2": torch.tensor(0.001), "input_scale": torch.tensor(0.02)}
    return stored, (values * scale[..., None]).flatten(1)


def fp4(weight: Tensor, group: int, power_of_two: bool = False) -> Packed:
    """Two features per byte. Scales are e4m3 times one number, or bytes that stand for powers of two."""
    groups = weight.unflatten(1, (-1, group))
    if power_of_two:
        exponent = (groups.abs().amax(-1) / 6).log2().ceil()
        scale, stored = exponent.exp2(), {"weight_scale": (exponent + 127).to(torch.uint8)}
    else:
        second = weight.abs().max() / 6 / 448
        first = (groups.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
        scale, stored = first.float() * second, {"weight_scale": first, "weight_scale_2": second, "input_scale": torch.tensor(0.02)}
    nibbles = ((groups / scale[..., None])[..., None] - E2M1).abs().argmin(-1).flatten(1).to(torch.uint8)
    real = (E2M1[nibbles.long()].unflatten(1, (-1, group)) * scale[..., None]).flatten(1)
    return stored | {"weight": nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)}, real


def fp8_blocks(weight: Tensor) -> Packed:
    stored, real = blocks8(weight, 128)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"][:, None, :, None]}, real


def mxfp8(weight: Tensor) -> Packed:
    exponent = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 448).log2().ceil()
    scale = exponent.exp2().repeat_interleave(32, 1)
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": (exponent + 127).to(torch.uint8)}, values.float() * scale


def with_input_factors(pack: Callable[[Tensor], Packed]) -> Callable[[Tensor], Packed]:
    """A module whose input is multiplied by factors: the real weight has columns multiplied by them."""

    def packed(weight: Tensor) -> Packed:
        factors = torch.linspace(0.5, 2, weight.shape[1])
        stored, real = pack(weight / factors)
        return stored | {"pre_quant_scale": factors}, real * factors

    return packed


E4M3 = torch.float8_e4m3fn
INT4_32 = Int4(group_size=32, zero="none", scale_dtype="float32", clip=False)
# Name → (settings, pack, the format in the engine; None: plain numbers).
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed], Format | None]] = {
    "FP8": (
        {"quant_algo": "FP8"}, lambda w: rows8(w, E4M3, whole=True, static=True), Fp8(weights="tensor", activations="static"),
    ),
    "FP8 per channel": ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, lambda w: rows8(w, E4M3), Fp8()),
    "FP8 blocks": ({"quant_algo": "fp8_pb_wo"}, fp8_blocks, BlockFp8(rows=1, columns=128)),
    "MXFP8": ({"quant_algo": "MXFP8", "group_size": 32}, mxfp8, BlockFp8(rows=1, columns=32)),
    "int8": ({"quant_algo": "W8A16"}, lambda w: rows8(w, torch.int8), Int8()),
    "SmoothQuant": (
        {"quant_algo": "W8A8_SQ_PER_CHANNEL"}, lambda w: rows8(w, torch.int8, static=True), SmoothQuant(per_token=False),
    ),
    "AWQ": ({"quant_algo": "W4A16_AWQ", "group_size": 32}, lambda w: signed_int4(w, 32, True), INT4_32),
    "W4A8": ({"quant_algo": "W4A8_AWQ", "group_size": 32}, lambda w: signed_int4(w, 32), INT4_32),
    "AWQ with factors": ({"quant_algo": "W4A16_AWQ", "group_size": 32}, with_input_factors(lambda w: signed_int4(w, 32, True)), None),
    "NVFP4": ({"quant_algo": "NVFP4", "group_size": 16}, lambda w: fp4(w, 16), Fp4(group_size=16, scale="e4m3")),
    "MXFP4": ({"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32}, lambda w: fp4(w, 32, True), Fp4()),
}  # fmt: skip


def checkpoint_of(path: Path, case: str, extra: dict[str, Tensor] | None = None, **settings: Any) -> tuple[Path, dict[str, Tensor]]:
    """(a checkpoint with hf_quant_config.json, the real weights by Hugging Face name)."""
    quantization, pack, _ = CASES[case]
    source = tiny.save(tiny.model(**SIZES), path)
    tensors, weights = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS]:
        parts, weights[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors | (extra or {}), source / "model.safetensors")
    section = {"kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | quantization | settings
    (source / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    return source, weights


@pytest.mark.parametrize("case", CASES)
def test_values_do_not_change(case: str, tmp_path: Path) -> None:
    source, weights = checkpoint_of(tmp_path / "hf", case)
    chosen = CASES[case][2]
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    if chosen is None:
        assert engine.config.recipe.name == "NO_QUANT"
        stored = load_file(engine.path / "rank0.safetensors")["layers.0.attention.out.weight"]
        assert torch.allclose(stored, weights["model.layers.0.self_attn.o_proj.weight"], rtol=1e-6)
        return
    formats = {engine.config.recipe.default, *engine.config.recipe.overrides.values()}
    assert chosen in formats or (isinstance(chosen, BlockFp8) and any(isinstance(one, BlockFp8) for one in formats))
    check_weights(engine, weights)


def test_the_memory_cost_of_a_format_without_kernels_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", "AWQ with factors")
    with caplog.at_level("WARNING", logger="stoker"):
        prepare(source, BuildConfig(device="cpu"))
    assert re.search(r"hf: 21 weights are stored as float32, 0\.\d+ MiB instead of 0\.\d+ MiB", caplog.text)
    caplog.clear()
    prepare(checkpoint_of(tmp_path / "fp8", "FP8")[0], BuildConfig(device="cpu"))
    assert "instead of" not in caplog.text


def test_the_stored_scales_of_the_cache_are_used_without_calibration(tmp_path: Path) -> None:
    prefix = "model.layers.{}.self_attn.{}_proj.{}_scale"
    scales = {prefix.format(i, kind, kind): torch.tensor(0.01) for i in range(3) for kind in "kv"}
    source, weights = checkpoint_of(tmp_path / "hf", "FP8", scales, kv_cache_quant_algo="FP8")
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    plain = build(source, tmp_path / "plain", BuildConfig(device="cpu", kv_cache_dtype="auto"), verify="files")
    assert (engine.config.recipe.kv_cache, engine.config.recipe.kv_scales) == ("float8_e4m3fn", "stored")
    assert engine.config.recipe.calibration == {} and plain.config.recipe.kv_cache is None
    check_weights(engine, weights)
    stored = load_file(engine.path / "rank0.safetensors")
    assert stored["layers.1.attention.value_scale"].tolist() == [2**-6] * 4, "0.01 rounded up to a power of two"
    assert stored["layers.1.attention.key_scale"].tolist() == [2**-5] * 4, "0.01 × the square root of 8 features"
    tokens = split_windows(torch.randint(0, 320, (80,), generator=torch.Generator().manual_seed(1)).tolist(), 40)
    found, expected = (LayerwiseModel(e.config.model, tokens).run(e.loader()).nll for e in (engine, plain))
    assert found == pytest.approx(expected, rel=2e-2) and found != expected


def test_layers_of_mixed_precision_have_their_own_algorithm(tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", "FP8", quant_algo="MIXED_PRECISION")
    layers = {f"model.layers.{i}.{block}": {"quant_algo": "FP8"} for i in range(3) for block in ("self_attn.*", "mlp.*_proj")}
    path = source / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}))
    assert prepare(source, BuildConfig(device="cpu")).config.recipe.default == CASES["FP8"][2]
    del layers["model.layers.1.mlp.*_proj"]
    path.write_text(json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}))
    with pytest.raises(CheckpointError, match=r"quantized_layers does not list model\.layers\.1\.mlp\.\w+, which has a weight_scale"):
        prepare(source, BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_algo": "NVFP4_SVD"}, r"quant_algo='NVFP4_SVD' of model\.layers\.\d.* is not supported. Supported: FP8, "),
        ({"group_size": 24}, "groups of 24 are not supported. Supported: 16, 32"),
        ({"group_size": "16"}, "group_size='16' is not a positive number"),
        ({"group_size": 32}, r"weight_scale has shape \[\d+, \d\], and quantization_config implies"),
        ({"has_zero_point": True}, "has_zero_point=true is not supported"),
        ({"kv_cache_quant_algo": "FP5"}, "kv_cache_quant_algo='FP5' is not supported"),
        ({"rotate": True}, "quantization_config: rotate='True' is not known"),
        ({"quantized_layers": [1]}, "quantized_layers=.* is not an object"),
        ({"quant_algo": None}, "quant_algo=None"),
    ],
)
def test_unsupported_settings_are_rejected(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", "NVFP4", **settings)
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.down_proj.weight_scale_2", torch.ones(3), r"weight_scale_2 has shape \[3\], and one number is expected"),
        ("mlp.down_proj.pre_quant_scale", torch.ones(3), r"pre_quant_scale has shape \[3\]"),
        ("mlp.down_proj.lora_a", torch.ones(3, 3), r"lora_a would not be used"),
        ("self_attn.k_proj.k_scale", torch.ones(3), "is not one scale of the KV cache"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", "NVFP4", {f"model.layers.1.{name}": tensor})
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))
