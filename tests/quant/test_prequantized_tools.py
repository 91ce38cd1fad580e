"""Checkpoints of GPTQ with 2, 3 and 8 bits, AutoRound and bitsandbytes: the real weights are those of the tools' own formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_prequantized_import import PROJECTIONS, SIZES, Packed, awq, check_weights, gptq, quantize_groups, real_weight
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.engine.layerwise import LayerwiseModel, split_windows

# The values of bitsandbytes' nf4 and fp4 tables are in each checkpoint; any 16 numbers are a table.
TABLE = torch.tensor([-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])


def bit_stream(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 words [n × bits / 32, columns] of values [n, columns]: the bits of one value after the other, lowest first."""
    stream = ((values[:, None].astype(np.int64) >> np.arange(bits)[None, :, None]) & 1).reshape(-1, 32, values.shape[1])
    return (stream << np.arange(32)[None, :, None]).sum(1).astype(np.uint32).view(np.int32)


def gptq_stream(weight: Tensor, group: int, bits: int) -> Packed:
    """GPTQ of 2 and 3 bits, version 1: zero points are stored minus one."""
    values, scale, zero = quantize_groups(weight, group, 2**bits - 1)
    stored = {
        "qweight": bit_stream(values.T, bits), "qzeros": bit_stream((zero - 1), bits).T, "scales": scale.T,
        "g_idx": (np.arange(weight.shape[1]) // group).astype(np.int32),
    }  # fmt: skip
    real = real_weight(values, scale, zero, np.arange(weight.shape[1]) // group)
    return {name: torch.from_numpy(array.copy()) for name, array in stored.items()}, real


def state(weight: Tensor, **values: Any) -> Tensor:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)} | values)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def four_bits(weight: Tensor, nested: bool = False) -> Packed:
    """bitsandbytes 4 bit: blocks of 64 values of the flat weight; scales in blocks of 256 if they are quantized as well."""
    blocks = weight.reshape(-1, 64)
    absmax, extra = blocks.abs().amax(1), {}
    if nested:
        offset, code = absmax.mean(), torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256).abs().amax(1)
        each = outer.repeat_interleave(256)[: len(absmax)]
        index = (((absmax - offset) / each)[:, None] - code).abs().argmin(1)
        absmax = code[index] * each + offset
        extra = {
            "weight.absmax": index.to(torch.uint8), "weight.nested_absmax": outer, "weight.nested_quant_map": code,
            "weight.quant_state.bitsandbytes__nf4": state(weight, nested_blocksize=256, nested_offset=float(offset)),
        }  # fmt: skip
    index = ((blocks / absmax[:, None])[..., None] - TABLE).abs().argmin(-1).flatten().to(torch.uint8)
    stored = {
        "weight": ((index[0::2] << 4) | index[1::2])[:, None], "weight.absmax": absmax, "weight.quant_map": TABLE.clone(),
        "weight.quant_state.bitsandbytes__nf4": state(weight),
    }  # fmt: skip
    return stored | extra, (TABLE[index.long()].view(-1, 64) * absmax[:, None]).view(weight.shape)


def eight_bits(weight: Tensor) -> Packed:
    """LLM.int8: the largest magnitude of each row is 127."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values * largest[:, None] / 127


ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", "autoround_version": "0.5"}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq 2 bits": ({"quant_method": "gptq", "bits": 2, "group_size": 32}, lambda w: gptq_stream(w, 32, 2)),
    "gptq 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, lambda w: gptq_stream(w, 32, 3)),
    "gptq 8 bits act-order": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}, lambda w: gptq(w, 32, bits=8, act_order=True),
    ),
    "gptq, 8 bits and other groups in a module": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {
            "-:lm_head": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 16}, ".*(down|gate)_proj": {"bits": 4},
        }},
        lambda w: gptq(w, 16, bits=8) if w.shape == (64, 96) else gptq(w, 32),
    ),
    "auto-round": (ROUND | {"packing_format": "auto_round"}, lambda w: gptq(w, 32, v2=True)),
    "auto-round as gptq": (ROUND | {"packing_format": "auto_round:auto_gptq"}, lambda w: gptq(w, 32)),
    "auto-round as awq": (ROUND | {"packing_format": "auto_round:auto_awq"}, lambda w: awq(w, 32)),
    "auto-round, 8 bits in a module": (
        ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": {r".*down_proj": {"bits": 8}}},
        lambda w: gptq(w, 32, bits=8 if w.shape == (64, 96) else 4),
    ),
    "bitsandbytes 4 bits": (FOUR, four_bits),
    "bitsandbytes 4 bits, nested": (FOUR | {"bnb_4bit_use_double_quant": True}, lambda w: four_bits(w, nested=True)),
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight_bits),
}  # fmt: skip


def checkpoint_of(path: Path, case: str, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    quantization, pack = CASES[case]
    source = tiny.save(tiny.model(**SIZES), path)
    tensors, weights = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS]:
        parts, weights[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization | changes}))
    return source, weights


@pytest.mark.parametrize("case", CASES)
def test_values_do_not_change(case: str, tmp_path: Path) -> None:
    source, weights = checkpoint_of(tmp_path / "hf", case)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    check_weights(engine, weights)


@pytest.mark.parametrize("case", ["gptq 3 bits", "gptq 8 bits act-order", "bitsandbytes 4 bits, nested"])
def test_an_engine_scores_text_like_its_real_weights(case: str, tmp_path: Path) -> None:
    source, weights = checkpoint_of(tmp_path / "hf", case)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    plain = tiny.save(tiny.model(**SIZES), tmp_path / "plain")
    save_file(load_file(plain / "model.safetensors") | weights, plain / "model.safetensors")
    dense = build(plain, tmp_path / "dense", BuildConfig(device="cpu"), verify="files")
    tokens = split_windows(torch.randint(0, 320, (80,), generator=torch.Generator().manual_seed(1)).tolist(), 40)
    found, expected = (LayerwiseModel(e.config.model, tokens).run(e.loader()).nll for e in (engine, dense))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "packing_format=.*is not supported. Supported: auto_round, "),
        ("auto-round", {"data_type": "mx_fp"}, "data_type='mx_fp' is not supported"),
        ("auto-round", {"extra_config": {"(": {"bits": 8}}}, r"the pattern '\(' in extra_config is not supported"),
        ("auto-round", {"extra_config": {".*": 3}}, r"\.\*=3 is not an object"),
        ("auto-round", {"rotation": 1}, "rotation='1' is not known"),
        ("bitsandbytes 4 bits", {"bnb_5bit": True}, "bnb_5bit='True' is not known"),
    ],
)
def test_unsupported_settings_are_rejected(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", case, **changes)
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("case", "suffix", "tensor", "message"),
    [
        ("bitsandbytes 4 bits", "weight.quant_state.bitsandbytes__nf4", torch.ones(3, dtype=torch.uint8), "is not a quantization state"),
        (
            "bitsandbytes 4 bits",
            "weight.quant_state.bitsandbytes__nf4",
            state(torch.ones(2, 2), shape=[1 << 40, 2]),
            "sizes are out of range",
        ),
        ("bitsandbytes 4 bits", "weight.absmax", torch.ones(3), r"absmax has shape \[3\]"),
        ("bitsandbytes 8 bits", "weight_format", torch.tensor(1, dtype=torch.uint8), r"weight_format is not 0 \(rows\)"),
        ("bitsandbytes 8 bits", "SCB", torch.ones(3), r"SCB has shape \[3\]"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(case: str, suffix: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path / "hf", case)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {f"model.layers.1.mlp.down_proj.{suffix}": tensor}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))
