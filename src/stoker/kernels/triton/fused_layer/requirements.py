"""Which layers the fused layer kernels can compute, and the constants that both kernels derive from their weights."""

from __future__ import annotations

import torch

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.triton.device import supports
from stoker.kernels.triton.fused_layer.linear_args import pack_numbers
from stoker.kernels.triton.ptx.pipeline import BLOCK_ROW_BYTES
from stoker.kernels.types import FusedLayer

SHARED_BYTES = 227 << 10  # of one CTA on sm_90
FORMATS = ("bfloat16", "float16", "fp8", "bytes", "int4")  # the kernels' FORMAT
MIN_GROUP_SIZE = 32  # of int4: the 16 bytes that a lane reads of a block are of one group, or of one pair


def meets_requirements(layer: FusedLayer) -> bool:
    """Whether the device has the kernels, all weights have one format that the kernels read, and the fusions are the standard ones.

    Each kernel has further limits (`supports_small_batch`, `supports_large_batch`).
    """
    weights = [linear.weight for linear in layer.linears]
    first = weights[0]
    if first is None or not supports(first.values, "fused_layer") or kernel_format(first) not in FORMATS:
        return False
    return all(w is not None and _format(w) == _format(first) and _is_aligned(w) for w in weights) and _has_standard_fusions(layer)


def kernel_format(weight: PackedWeight) -> str | None:
    """The kernels' constant FORMAT for a weight, or None for weights that the kernels do not multiply.

    Not multiplied are FP8 other than with a scale per row and per token, int8 with activation quantization or groups, and int4 with
    permuted columns, FP4 values or groups below MIN_GROUP_SIZE.
    """
    activations, group = weight.activations, weight.group_size
    if weight.format == "dense":
        return str(weight.values.dtype).removeprefix("torch.")
    if weight.format == "fp8":
        return "fp8" if activations == "token" and not group else None
    if weight.format == "int8":
        return "bytes" if activations == "none" and not group else None
    return "int4" if weight.layout == "paired" and not weight.is_fp4 and weight.column_order is None and group >= MIN_GROUP_SIZE else None


def first_weight(layer: FusedLayer) -> PackedWeight:
    """The weight of the output projection. All weights of a fused layer have its format."""
    assert layer.out.weight is not None
    return layer.out.weight


def scale_dtype(weight: PackedWeight) -> str:
    """The kernels' constant SCALE_DTYPE: "float" for float32, because Triton's serialization would turn "fp32" into a type (see `aot`)."""
    if weight.scale is None:
        return "float"
    return {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(weight.scale.dtype, "float")


def linear_flags(layer: FusedLayer) -> dict[str, str]:
    """The constexpr arguments GATED and HAS_BIAS: strings of `pack_numbers` with 0 or 1 per linear."""
    return {
        "GATED": pack_numbers(linear.fusion.gate is not None for linear in layer.linears),
        "HAS_BIAS": pack_numbers(linear.weight is not None and linear.weight.bias is not None for linear in layer.linears),
    }


def _format(weight: PackedWeight) -> tuple[object, ...]:
    """What must be equal for all weights of a fused layer."""
    return kernel_format(weight), weight.zero_kind, weight.group_size, scale_dtype(weight), weight.values.device


def _is_aligned(weight: PackedWeight) -> bool:
    """Whether the weight consists of tiles of 16 rows (32 for gates and what they gate) and blocks of 128 bytes, and copies are aligned.

    Rows, scales and zeros are copied 16 bytes at a time. int4 needs 16-bit scales, of an even number of groups per block.
    """
    stored, scale, zero = weight.values, weight.scale, weight.zero
    in_tiles = stored.shape[0] % 32 == 0 and weight.row_bytes % BLOCK_ROW_BYTES.value == 0
    aligned = stored.stride(1) == 1 and stored.stride(0) * stored.element_size() % 16 == 0 and stored.data_ptr() % 16 == 0
    if weight.format != "int4":
        return in_tiles and aligned
    if scale is None or any(part is not None and (part.data_ptr() % 16 or not part.is_contiguous()) for part in (scale, zero)):
        return False
    return in_tiles and aligned and scale.element_size() == 2 and scale.shape[0] == 2 * weight.row_bytes // weight.group_size


def _has_standard_fusions(layer: FusedLayer) -> bool:
    """Whether gate_up and qkv have RMS norms with weights, and the MLP is gated by a known activation."""
    normed = [linear.fusion for linear in (layer.up, layer.qkv) if linear is not None]
    rms = all(f.norm_kind == "rms" and f.norm_weight is not None and f.norm_bias is None for f in normed)
    return rms and layer.up.fusion.gate in ACTIVATIONS and all(f.input_gate is None for f in normed)
