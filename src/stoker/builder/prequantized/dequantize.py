"""Converts the stored tensors of a format back to float32, for builds that store an imported weight in another format."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.quantized import Int4Weight
from stoker.kernels.reference.quant_fp8 import widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.reference.quant_int8 import widen_groups
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.format import Format
from stoker.quant.int4 import Int4
from stoker.quant.int8_grouped import GroupedInt8


def dequantize(chosen: Format, t: dict[str, Tensor]) -> Tensor:
    """float32 [out, in] from the stored tensors of a weight, by suffix."""
    if isinstance(chosen, Int4):
        values = dequantize_int4(Int4Weight(t["weight"], t["scale"], t.get("zero"), t.get("offset"), chosen.group_size))
        return values if "order" not in t else torch.empty_like(values).index_copy_(1, t["order"].long(), values)
    if isinstance(chosen, GroupedInt8):
        return widen_groups(t["weight"], t["scale"], t.get("offset"), chosen.group_size)
    if isinstance(chosen, BlockFp8):
        return widen_blocks(t["weight"], t["scale"], (chosen.rows, chosen.columns))
    return t["weight"].float() * t["scale"][:, None]
