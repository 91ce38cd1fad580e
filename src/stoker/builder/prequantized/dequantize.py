"""Converts the stored tensors of a format back to float32, for builds that store an imported weight in another format."""

from __future__ import annotations

from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.quant_fp8 import widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.reference.quant_int8 import widen_groups
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8_grouped import GroupedInt8, in_feature_order


def dequantize(chosen: Format, tensors: dict[str, Tensor]) -> Tensor:
    """The dequantized weight, float32 [out, in], from its stored tensors by suffix; [experts, out, in] for stacked experts in FP4."""
    if isinstance(chosen, Int4):
        weight = chosen.pack(dict(tensors), None)
        values = dequantize_int4(weight)
        return in_feature_order(values, weight.column_order)
    if isinstance(chosen, Fp4):
        return dequantize_int4(chosen.pack(dict(tensors), None))
    if isinstance(chosen, GroupedInt8):
        grouped = PackedWeight("int8", tensors["weight"], tensors["scale"], tensors.get("offset"), chosen.group_size)
        return in_feature_order(widen_groups(grouped), tensors.get("order"))
    if isinstance(chosen, BlockFp8):
        return widen_blocks(chosen.pack(dict(tensors), None))
    if isinstance(chosen, Dense):
        return tensors["weight"].float()
    return tensors["weight"].float() * tensors["scale"].float().unsqueeze(-1)
