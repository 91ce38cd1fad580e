"""Pre-quantized checkpoints, packed here as their formats define, are imported without a change of values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.build import build
from stoker.builder.checkpoint.gguf.blocks import PREQUANTIZED_BLOCKS
from stoker.builder.config import BuildConfig
from stoker.builder.prequantized.dequantize import dequantize
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.engine.reader import Engine
from stoker.layers.decoder import declare
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.formats.smoothquant import SmoothQuant

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Packed = tuple[dict[str, Tensor], Tensor]  # the tensors of a module by suffix, and the real weight


def pack_words(values: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """int32 words of unsigned values along the last axis. Bit field i of a word holds value order[i] of a run of len(order)."""
    count = len(order)
    bits = 32 // count
    runs = values.astype(np.uint32).reshape(*values.shape[:-1], -1, count)
    packed = np.zeros(runs.shape[:-1], dtype=np.uint32)
    for field, source in enumerate(order):
        packed |= runs[..., source] << np.uint32(field * bits)
    return packed.view(np.int32)


def quantize_groups(weight: Tensor, group: int, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values 0 to `largest` [out, in], float16 scales and integer zero points [out, groups]) of asymmetric rounding."""
    groups = weight.numpy().reshape(weight.shape[0], -1, group)
    low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
    scale = ((high - low) / largest).astype(np.float16)
    zero = np.rint(-low / scale.astype(np.float32)).clip(1, largest)
    values = (np.rint(groups / scale.astype(np.float32)[..., None]) + zero[..., None]).clip(0, largest)
    return values.reshape(weight.shape).astype(np.int64), scale, zero.astype(np.int64)


def real_weight(values: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_of: np.ndarray) -> Tensor:
    return torch.from_numpy((values - zero[:, group_of]).astype(np.float32) * scale.astype(np.float32)[:, group_of])


def awq(weight: Tensor, group: int) -> Packed:
    values, scale, zero = quantize_groups(weight, group, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": pack_words(values.T, order), "qzeros": pack_words(zero.T, order), "scales": scale.T}
    return _tensors(stored), real_weight(values, scale, zero, np.arange(weight.shape[1]) // group)


def gptq(weight: Tensor, group: int, bits: int = 4, v2: bool = False, act_order: bool = False) -> Packed:
    size, run = weight.shape[1], tuple(range(32 // bits))
    order = np.random.default_rng(3).permutation(size) if act_order else np.arange(size)
    group_of = np.empty(size, dtype=np.int64)
    group_of[order] = np.arange(size) // group
    values, scale, zero = quantize_groups(weight[:, order], group, 2**bits - 1)
    back = np.empty_like(values)
    back[:, order] = values
    qweight = pack_words(back.reshape(len(weight), size).copy(), run).T
    stored = {
        "qweight": qweight,
        "qzeros": pack_words(zero.T - (0 if v2 else 1), run),
        "scales": scale.T,
        "g_idx": group_of.astype(np.int32),
    }
    return _tensors(stored), real_weight(back, scale, zero, group_of)


def pack_quantized(weight: Tensor, group: int, symmetric: bool) -> Packed:
    values, scale, zero = quantize_groups(weight, group, 15)
    run = tuple(range(8))
    if symmetric:
        zero = np.full_like(zero, 8)
    stored = {"weight_packed": pack_words(values, run), "weight_scale": scale, "weight_shape": np.array(weight.shape)}
    if not symmetric:
        stored["weight_zero_point"] = pack_words(zero.T, run).T
    return _tensors(stored), real_weight(values, scale, zero, np.arange(weight.shape[1]) // group)


def rows8(weight: Tensor, dtype: torch.dtype, whole: bool = False, suffix: str = "weight_scale", static: bool = False) -> Packed:
    limit = 127.0 if dtype == torch.int8 else 448.0
    scale = (weight.abs().amax() if whole else weight.abs().amax(1, keepdim=True)) / limit
    values = (weight / scale).round() if dtype == torch.int8 else weight / scale
    stored = {"weight": values.to(dtype), suffix: scale.reshape(1) if whole else scale}
    return stored | ({"input_scale": torch.tensor([0.05])} if static else {}), stored["weight"].float() * scale


def blocks8(weight: Tensor, side: int) -> Packed:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // side), -(-columns // side))
    values, wide = torch.empty(rows, columns), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side))
            scale[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn).float()
            wide[part] = values[part] * scale[i, j]
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale}, wide


def _tensors(stored: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in stored.items()}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights, "input_activations": inputs}}}


GROUPS32 = {"bits": 4, "group_size": 32}
INT8, FLOAT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
# name: (quantization_config, function that packs a weight, format of the engine)
CASES: dict[str, tuple[dict[str, Any], Any, Format]] = {
    "awq": ({"quant_method": "awq", **GROUPS32}, lambda w: awq(w, 32), Int4(group_size=32, clip=False)),
    "gptq": ({"quant_method": "gptq", **GROUPS32}, lambda w: gptq(w, 32), Int4(group_size=32, clip=False)),
    "gptq v2": (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", **GROUPS32},
        lambda w: gptq(w, 32, v2=True), Int4(group_size=32, clip=False),
    ),
    "gptq act-order": (
        {"quant_method": "gptq", "desc_act": True, **GROUPS32},
        lambda w: gptq(w, 32, act_order=True), Int4(group_size=32, clip=False, reorder=True),
    ),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, lambda w: gptq(w, 32, bits=8), GroupedInt8(shifted=True)),
    "pack-quantized": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}),
        lambda w: pack_quantized(w, 32, True), Int4(group_size=32, zero="none", clip=False),
    ),
    "pack-quantized asymmetric": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
        lambda w: pack_quantized(w, 32, False), Int4(group_size=32, clip=False),
    ),
    "int-quantized": (compressed(INT8), lambda w: rows8(w, torch.int8), Int8()),
    "int-quantized W8A8": (compressed(INT8, TOKEN), lambda w: rows8(w, torch.int8), SmoothQuant()),
    "float-quantized": (compressed(FLOAT8, TOKEN), lambda w: rows8(w, torch.float8_e4m3fn), Fp8()),
    "float-quantized static": (
        compressed(FLOAT8 | {"strategy": "tensor"}, {"num_bits": 8, "dynamic": False}),
        lambda w: rows8(w, torch.float8_e4m3fn, whole=True, static=True), Fp8(activations="static"),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w: rows8(w, torch.float8_e4m3fn, whole=True), Fp8(weights="tensor"),
    ),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda w: blocks8(w, 32), BlockFp8(rows=32, columns=32)),
}  # fmt: skip


def packed_checkpoint(path: Path, case: str, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """(a checkpoint of the case, the real weights by Hugging Face name)."""
    quantization, pack, _ = CASES[case]
    source = tiny.save(tiny.model(**SIZES), path)
    tensors, weights = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS]:
        stem = name.removesuffix(".weight")
        parts, weights[name] = pack(tensors.pop(name))
        tensors |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization | changes}))
    return source, weights


def fused_weights(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The real_weight weights of a layer's linears by engine name."""

    def joined(block: str, *names: str) -> Tensor:
        return torch.cat([weights[f"model.layers.{layer}.{block}.{name}.weight"] for name in names])

    qkv, up = joined("self_attn", "q_proj", "k_proj", "v_proj"), joined("mlp", "gate_proj", "up_proj")
    return {"attention.qkv": qkv, "attention.out": joined("self_attn", "o_proj"), "mlp.up": up, "mlp.down": joined("mlp", "down_proj")}


def check_weights(engine: Engine, weights: dict[str, Tensor]) -> None:
    stored = load_file(engine.path / "rank0.safetensors")
    for layer in range(3):
        for name, expected in fused_weights(weights, layer).items():
            prefix = f"layers.{layer}.{name}."
            tensors = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
            recipe = engine.config.recipe
            found = dequantize(recipe.overrides.get(prefix[:-1], recipe.default), tensors)
            assert torch.equal(found, expected) or torch.allclose(found, expected, rtol=1e-6, atol=1e-7), (
                prefix,
                (found - expected).abs().max(),
            )


@pytest.mark.parametrize("case", CASES)
def test_values_do_not_change(case: str, tmp_path: Path) -> None:
    source, weights = packed_checkpoint(tmp_path / "hf", case)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    assert engine.config.recipe.name == "AS_STORED"
    assert type(engine.config.recipe.default) is type(CASES[case][2])
    assert engine.config.recipe.default == CASES[case][2]
    check_weights(engine, weights)


@pytest.mark.parametrize("case", ["awq", "gptq act-order", "int-quantized", "fp8 blocks", "pack-quantized"])
def test_an_engine_scores_text_like_its_real_weights(case: str, tmp_path: Path) -> None:
    source, weights = packed_checkpoint(tmp_path / "hf", case)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    plain = tiny.save(tiny.model(**SIZES), tmp_path / "plain")
    save_file(load_file(plain / "model.safetensors") | weights, plain / "model.safetensors")
    dense = build(plain, tmp_path / "dense", BuildConfig(device="cpu"), verify="files")
    widened = build(source, tmp_path / "widened", BuildConfig(device="cpu", quantization="NO_QUANT"), verify="files")
    tokens = split_windows(torch.randint(0, 320, (80,), generator=torch.Generator().manual_seed(1)).tolist(), 40)
    imported, expected, wide = (LayerwiseModel(e.config.model, tokens).run(e.loader()) for e in (engine, dense, widened))
    assert wide.nll == pytest.approx(expected.nll, rel=1e-5)
    # e4m3 activations are part of the block format.
    assert imported.nll == pytest.approx(expected.nll, rel=2e-2 if case == "fp8 blocks" else 1e-3)


def test_imported_weights_are_sharded_without_a_change(tmp_path: Path) -> None:
    source, weights = packed_checkpoint(tmp_path / "hf", "awq")
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", mapping=Mapping(tensor_parallel=2)), verify="files")
    shards = [load_file(engine.path / f"rank{rank}.safetensors") for rank in range(2)]
    chosen = engine.config.recipe.overrides.get("layers.*.attention.out", engine.config.recipe.default)
    halves = [{k.rpartition(".")[2]: t for k, t in shard.items() if k.startswith("layers.0.attention.out.")} for shard in shards]
    found = torch.cat([dequantize(chosen, half) for half in halves], dim=1)
    assert torch.allclose(found, weights["model.layers.0.self_attn.o_proj.weight"], atol=1e-7)


def test_a_quantized_cache_is_calibrated_for_imported_weights(tmp_path: Path) -> None:
    source, weights = packed_checkpoint(tmp_path / "hf", "gptq")
    config = BuildConfig(device="cpu", kv_cache_dtype="int8", calibration_size=2, calibration_seq_len=32)
    engine = build(source, tmp_path / "engine", config, verify="files")
    assert engine.config.recipe.kv_cache == "int8"
    check_weights(engine, weights)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq", {"bits": 3}, "3 bits in groups of 32 are not supported"),
        ("awq", {"group_size": 48}, "in groups of 48 are not supported"),
        ("awq", {"version": "marlin"}, "version='marlin' is not supported"),
        ("gptq", {"bits": 5}, "5 bits"),
        ("gptq", {"group_size": 64}, r"down_proj\.qzeros has shape \[3, 8\], and quantization_config implies \[2, 8\].*block size"),
        ("fp8", {"weight_block_size": [32]}, "is not .rows, columns."),
        ("fp8 blocks", {"weight_block_size": [16, 16]}, r"weight_scale_inv has shape \[2, 3\], and quantization_config implies \[4, 6\]"),
        ("fp8 blocks", {"weight_block_size": None}, "weight_scale is missing"),
        ("int-quantized", {"config_groups": {}}, "0 config_groups are not supported"),
        ("awq", {"quant_method": "quip"}, r"quant_method: quip"),
    ],
)
def test_unsupported_settings_are_rejected(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path / "hf", case, **change)
    with pytest.raises(CheckpointError, match=message):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path / "hf", "gptq")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.scales is missing"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"))


def test_as_stored_requires_prequantized_weights(tmp_path: Path) -> None:
    source = tiny.save(tiny.model(), tmp_path / "hf")
    with pytest.raises(ConfigError, match="has no pre-quantized weights"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu", quantization="as_stored"))


@pytest.mark.parametrize("kind", PREQUANTIZED_BLOCKS, ids=lambda kind: kind.name)
def test_gguf_blocks_have_the_values_of_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    """Of random bytes, which contain all values and scales. Half-precision fields are made finite."""
    rows = gguf_files.random_blocks(kind, 12, 3, seed=int(kind))
    if kind.name == "Q8_K":  # the library cannot dequantize it: a float32 scale, 256 int8 values, and 16 int16 sums that are not needed
        blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        scale, values = blocks[:, :4].copy().view(np.float32), blocks[:, 4:260].copy().view(np.int8)
        expected = torch.from_numpy(scale * values.astype(np.float32)).view(12, -1)
    else:
        expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    found = dequantize(PREQUANTIZED_BLOCKS[kind].format, PREQUANTIZED_BLOCKS[kind].repack(torch.from_numpy(rows)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_files_are_imported_with_heads_in_the_order_of_hugging_face(kind: str, tmp_path: Path) -> None:
    code = gguf.GGMLQuantizationType[kind]
    made = tiny.model(**SIZES)
    source = gguf_files.write(tmp_path / "m.gguf", made, code)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    names = {f"model.layers.{i}.": i for i in range(3)}
    weights = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), code), code))
        for name, tensor in made.state_dict().items()
        if any(name.startswith(layer) for layer in names) and tensor.ndim == 2
    }
    check_weights(engine, weights)


def test_parts_of_different_block_types_have_int8_groups_in_common(tmp_path: Path) -> None:
    """As in Q4_K_M files, where v and down have more bits than the other matrices of some layers."""
    made = tiny.model(**SIZES)
    types = {"attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q8_0"}

    def kind(name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[types.get(name.split(".")[-2], "Q5_0")]

    source = gguf_files.write(tmp_path / "m.gguf", made, kind)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    weights = {}
    for name, tensor in made.state_dict().items():
        if "layers" in name and tensor.ndim == 2:
            code = kind(gguf_files.gguf_name(name))
            weights[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), code), code))
    check_weights(engine, weights)
    recipe, formats = engine.config.recipe, {}
    for spec in declare(engine.config.model).values():
        if spec.name in ("layers.0.attention.qkv", "layers.0.mlp.up"):
            formats[spec.name] = recipe.format_for(spec)
    assert all(isinstance(found, GroupedInt8) and found.shifted for found in formats.values()) and len(formats) == 2
