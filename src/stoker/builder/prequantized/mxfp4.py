"""MXFP4 checkpoints (gpt-oss), whose stacked experts keep their stored bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import check_known_keys, dtype_name
from stoker.builder.prequantized.fp4 import mxfp4_tensors
from stoker.builder.prequantized.weight import PrequantizedWeight, ReadWeights
from stoker.quant.formats.fp4 import Fp4

_BLOCK_BYTES = 16  # of 32 values that share a scale
_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")  # tensors show which modules are quantized


def read_mxfp4(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> ReadWeights:
    """The weights [experts, in, out] that a checkpoint stores as `x_blocks` and `x_scales` in place of `x`, by name.

    Blocks are uint8 [experts, out, blocks, 16], and scales uint8 [experts, out, blocks]. The low nibble of a byte comes first; the values
    of a block are multiplied by 2 ** (scale - 127). Raises CheckpointError when they do not fit, and for an unknown setting.
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
        if info.shape[3] != _BLOCK_BYTES:
            raise CheckpointError(f"{name} has blocks of {2 * info.shape[3]} values, and MXFP4 has 32.", cure=DOWNLOAD_AGAIN)
        if wrong := [part for part in (name, scales) if tensors[part].dtype != torch.uint8]:
            found_dtype = dtype_name(tensors[wrong[0]].dtype)
            raise CheckpointError(f"{wrong[0]} is {found_dtype}, and uint8 is expected.", cure=DOWNLOAD_AGAIN)
        experts, out_features, blocks, block_bytes = info.shape
        shape = (experts, blocks * block_bytes * 2, out_features)
        found[stem] = PrequantizedWeight((name, scales), shape, Fp4(), _repack(name), is_transposed=True)
    return found


def _repack(name: str) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """A function from blocks and scales to the stored tensors of `Fp4`, [experts, out, …]."""
    return lambda parts: mxfp4_tensors(name, parts[0].flatten(2), parts[1])
