"""Pre-quantized checkpoints with invalid tensors or settings are rejected, and the error names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_prequantized_import import CASES, FLOAT8, INT8, TOKEN, compressed, packed_checkpoint
from torch import Tensor

from stoker.base.errors import CheckpointError, StokerError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare

STEM = "model.layers.1.mlp.down_proj"
Change = Callable[[Tensor], Tensor]


def checkpoint_with(path: Path, case: str, suffix: str, change: Change, **settings: Any) -> Path:
    """A checkpoint of the case in which one tensor is changed."""
    source, _ = packed_checkpoint(path, case, **settings)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{STEM}.{suffix}"] = change(tensors[f"{STEM}.{suffix}"]).contiguous()
    save_file(tensors, source / "model.safetensors")
    return source


def with_first_value(value: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        wide = tensor.float()
        wide.view(-1)[0] = value
        return wide.to(tensor.dtype)

    return change


@pytest.mark.parametrize("quantization", [None, "NO_QUANT"])
@pytest.mark.parametrize(
    ("case", "suffix", "value"),
    [
        ("awq", "scales", float("nan")), ("gptq", "scales", float("inf")), ("gptq 8 bits", "scales", float("nan")),
        ("pack-quantized", "weight_scale", float("inf")), ("int-quantized", "weight_scale", float("nan")),
        ("fp8", "weight_scale", float("inf")), ("fp8", "weight", float("nan")), ("fp8 blocks", "weight_scale_inv", float("nan")),
        ("float-quantized static", "input_scale", float("nan")),
    ],
)  # fmt: skip
def test_nan_and_infinity_are_rejected(case: str, suffix: str, value: float, quantization: str | None, tmp_path: Path) -> None:
    if quantization is not None and suffix == "input_scale":
        return  # builds without quantization do not read it
    source = checkpoint_with(tmp_path / "hf", case, suffix, with_first_value(value))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {STEM}.*NaN or infinity"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu", quantization=quantization), verify="files")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("case", "change", "settings"),
    [
        ("gptq", lambda g: g.flip(0), {}),  # an order without desc_act
        ("gptq act-order", lambda g: torch.zeros_like(g), {}),  # all features in one group
        ("gptq act-order", lambda g: g + 1, {}),
        ("gptq act-order", lambda g: -g, {}),
        ("gptq 8 bits", lambda g: g.roll(1), {}),
    ],
)
def test_wrong_group_indices_are_rejected(case: str, change: Change, settings: dict[str, Any], tmp_path: Path) -> None:
    source = checkpoint_with(tmp_path / "hf", case, "g_idx", change, **settings)
    with pytest.raises(CheckpointError, match=rf"{STEM}\.g_idx does not assign features to groups of 32.*desc_act"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")


def test_desc_act_with_the_natural_order_is_supported(tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path / "hf", "gptq", desc_act=True)
    build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")


@pytest.mark.parametrize(
    ("case", "suffix", "change", "message"),
    [
        ("awq", "qweight", lambda t: t.flatten(), r"qweight has shape \[.*\], and a matrix is expected"),
        ("awq", "scales", lambda t: t.to(torch.int32), "scales is int32, and float16 or bfloat16 or float32 is expected"),
        ("awq", "qzeros", lambda t: t.to(torch.int64), "qzeros is int64, and int32 is expected"),
        ("gptq", "qzeros", lambda t: t.float(), "qzeros is float32, and int32 is expected"),
        ("gptq", "g_idx", lambda t: t[:-1], "g_idx has shape"),
        ("pack-quantized", "weight_packed", lambda t: t.flatten(), "weight_packed has shape"),
        ("pack-quantized asymmetric", "weight_zero_point", lambda t: t[:-1], "weight_zero_point has shape"),
        ("int-quantized", "weight", lambda t: t[None], "weight has shape .*and a matrix is expected"),
        ("fp8", "weight_scale", lambda t: t.repeat(5), r"weight_scale \[5\] float32 does not fit"),
        ("float-quantized static", "input_scale", lambda t: t.repeat(5), r"input_scale \[5\] float32 does not fit"),
        ("float-quantized static", "input_scale", lambda t: t.int(), r"input_scale \[1\] int32 does not fit"),
    ],
)  # fmt: skip
def test_tensors_of_wrong_shape_or_dtype_are_named(case: str, suffix: str, change: Change, message: str, tmp_path: Path) -> None:
    source = checkpoint_with(tmp_path / "hf", case, suffix, change)
    with pytest.raises(CheckpointError, match=rf"{STEM}\.{message}"):
        prepare(source, BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (compressed(INT8, TOKEN | {"num_bits": 4}), "4-bit int input_activations of 8-bit int weights are not supported"),
        (compressed(INT8, TOKEN | {"type": "float"}), "8-bit float input_activations of 8-bit int weights are not supported"),
        (compressed(FLOAT8, TOKEN | {"type": "int"}), "8-bit int input_activations of 8-bit float weights"),
        (compressed(INT8) | {"format": "pack-quantized"}, "weight_packed is missing, and format='pack-quantized' needs it"),
    ],
)
def test_contradicting_settings_are_rejected(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path / "hf", "int-quantized", **quantization)
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))


WRONG = ("x", -1, 0, None, [], {}, 1.5, True, 10**12, [1, 2], [[]], {"a": 1}, float("nan"), 4.0)


@pytest.mark.parametrize("case", ["awq", "gptq act-order", "pack-quantized asymmetric", "float-quantized static", "fp8 blocks"])
def test_wrong_values_of_settings_are_rejected_or_without_effect(case: str, tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path / "hf", case)
    file = source / "config.json"
    config = json.loads(file.read_text())
    whole = CASES[case][0]
    nested = whole.get("config_groups", {}).get("group_0", {})
    changes = [{key: wrong} for key in (*whole, "version", "desc_act", "format") for wrong in WRONG]
    changes += [{"config_groups": {"group_0": nested | {key: wrong}}} for key in nested for wrong in WRONG]
    changes += [
        {"config_groups": {"group_0": {**nested, "weights": nested["weights"] | {k: w}}}} for k in nested.get("weights", {}) for w in WRONG
    ]
    for change in changes:
        file.write_text(json.dumps(config | {"quantization_config": whole | change}))
        try:
            prepare(source, BuildConfig(device="cpu"))
        except StokerError as problem:
            assert len(str(problem)) < 700, change
