"""MXFP4 checkpoints (gpt-oss), which are dequantized to bfloat16 as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import check_known_keys, dtype_name
from stoker.builder.prequantized.fp4 import FP4_VALUES, unpack_nibbles
from stoker.builder.prequantized.weight import DequantizedWeight, ReadWeights

_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")  # tensors show which modules are quantized


def read_mxfp4(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> ReadWeights:
    """The weights [experts, in, out] that a checkpoint stores as `x_blocks` and `x_scales` in place of `x`, by name.

    Blocks are uint8 [experts, out, blocks, 16], and scales uint8 [experts, out, blocks]. Raises CheckpointError when they do not fit, and
    for an unknown setting.
    """
    check_known_keys(quantization, _KEYS)
    found: ReadWeights = {}
    for name, info in tensors.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        scales = f"{stem}_scales"
        if len(info.shape) != 4 or 0 in info.shape or scales not in tensors or tensors[scales].shape != info.shape[:3]:
            raise CheckpointError(f"{scales} is missing, or does not fit {name} {list(info.shape)}.", cure=DOWNLOAD_AGAIN)
        if wrong := [part for part in (name, scales) if tensors[part].dtype != torch.uint8]:
            found_dtype = dtype_name(tensors[wrong[0]].dtype)
            raise CheckpointError(f"{wrong[0]} is {found_dtype}, and uint8 is expected.", cure=DOWNLOAD_AGAIN)
        experts, out_features, blocks, block_bytes = info.shape
        weight = TensorInfo((experts, blocks * block_bytes * 2, out_features), torch.bfloat16)
        found[stem] = DequantizedWeight((name, scales), weight, lambda parts: dequantize_mxfp4(*parts))
    return found


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The dequantized weights, bfloat16 [experts, in, out].

    The low nibble of a byte comes first; the values of a block are multiplied by 2 ** (scale - 127).
    """
    table = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
    nibbles = unpack_nibbles(blocks)
    exponent = scales.to(torch.int32)[..., None] - 127
    values = torch.ldexp(table[nibbles.long()].float(), exponent).to(torch.bfloat16)
    return values.flatten(-2).transpose(1, 2)
