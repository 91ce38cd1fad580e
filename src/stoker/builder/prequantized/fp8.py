"""Hugging Face `fp8` checkpoints: e4m3 weights with one scale per block or one scale per weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_known_keys, check_scales, check_tensor, check_values, matrix_shape
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp8 import Fp8

# Settings of the conversion, and copies of what the tensors show.
_KEYS = (
    "quant_method", "weight_block_size", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize",
    "weight_per_tensor", "act_per_tensor", "packed_modules_mapping", "kv_cache_scheme", "kv_cache_quant_targets",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_scheme": ("static", "dynamic"), "fmt": ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None), "expert_dtype": ("fp8", None),
}  # fmt: skip


def read_fp8(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The weights of an fp8 checkpoint, by name. Raises CheckpointError for unsupported settings, and scales that do not fit a weight.

    With `weight_block_size`, `weight_scale_inv` has one scale per block [rows, columns]; despite its name, weights are multiplied by it.
    Otherwise `weight_scale` has one scale, and `input_scale`, if present, is the static scale of activations.
    """
    check_known_keys(quantization, (*_KEYS, *_VALUES))
    check_values(quantization, _VALUES)
    block = block_size(quantization["weight_block_size"]) if quantization.get("weight_block_size") is not None else None
    is_static = str(quantization.get("activation_scheme", "static")).lower() == "static"
    found = {}
    for name, info in tensors.items():
        if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2 or not name.endswith(".weight"):
            continue
        matrix_shape(tensors, name)
        scale = f"{name}_scale_inv" if block is not None else f"{name}_scale"
        if scale not in tensors:
            raise CheckpointError(f"{scale} is missing, and {name} needs it.", cure=DOWNLOAD_AGAIN)
        found[name] = _in_blocks(tensors, name, scale, block) if block is not None else _per_tensor(tensors, name, scale, is_static)
    return found


def block_size(value: Any) -> tuple[int, int]:
    """(rows, columns) of the setting weight_block_size. Raises CheckpointError when it is not two positive numbers."""
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise CheckpointError(f"quantization_config: weight_block_size={value!r} is not [rows, columns].", cure=DOWNLOAD_AGAIN)
    return value[0], value[1]


def _in_blocks(tensors: Mapping[str, TensorInfo], name: str, scale: str, block: tuple[int, int]) -> PrequantizedWeight:
    """The weight `name` with one scale per block."""
    out_features, in_features = tensors[name].shape
    check_tensor(tensors, scale, (-(-out_features // block[0]), -(-in_features // block[1])), *FLOATS)
    chosen = BlockFp8(rows=block[0], columns=block[1])
    return PrequantizedWeight(
        (name, scale), (out_features, in_features), chosen, lambda parts: {"weight": parts[0], "scale": parts[1].float()}
    )


def _per_tensor(tensors: Mapping[str, TensorInfo], name: str, scale: str, is_static: bool) -> PrequantizedWeight:
    """The weight `name` with one scale, and a static scale of activations if `is_static` and the checkpoint has it."""
    out_features, in_features = tensors[name].shape
    input_scale = f"{name.removesuffix('.weight')}.input_scale"
    input_scales = (input_scale,) if input_scale in tensors and is_static else ()
    check_scales(tensors, name, scale, *input_scales)
    chosen = Fp8(weights="tensor", activations="static" if input_scales else "token")
    return PrequantizedWeight((name, scale, *input_scales), (out_features, in_features), chosen, repack_row_scales(out_features))


def repack_row_scales(out_features: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """A function from [weight, scale, optionally input scale] to stored tensors with one scale per row.

    The checkpoint's scale is one number, or one per row.
    """

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        stored = {"weight": parts[0], "scale": parts[1].float().reshape(-1).expand(out_features).contiguous()}
        return stored if len(parts) == 2 else stored | {"input_scale": parts[2].float().reshape(1)}

    return repack
