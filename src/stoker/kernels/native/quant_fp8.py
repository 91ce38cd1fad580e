"""Linears with e4m3 weights and activations by the C kernels, on processors with AVX512-BF16."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import CALL_ARGUMENTS, E4M3, FLOAT32, LINEARS, ROUNDINGS, TensorInfo, kernels
from stoker.kernels.native.linear import NativeWeight, fp8_weight, pack_linear, product
from stoker.kernels.reference import quant_fp8 as reference
from stoker.kernels.types import PLAIN, Fusion


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an FP8 weight (`ops.packed_linear`) by the C kernels where they support it, otherwise by the reference."""
    native = fp8_weight(weight)
    y = None if native is None else product(x, native, weight.bias, fusion)
    return reference.packed_linear(x, weight, fusion) if y is None else y


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """Prepare a weight at load (`ops.prepare_weight`): unchanged where the C kernels read it as it is stored, otherwise widened."""
    return weight if has_bfloat16_products() and fp8_weight(weight) is not None else reference.prepare_weight(weight)


@cache
def has_bfloat16_products() -> bool:
    """Whether gemm.c multiplies e4m3 on this processor, which must have AVX512-BF16: a linear of no rows only answers this."""
    library = kernels()
    weight = NativeWeight(TensorInfo(lambda: None, 0, E4M3, (1, 1), 1), rounding=ROUNDINGS["token"])  # type: ignore[arg-type]
    linear = pack_linear(weight, None, PLAIN)
    if isinstance(library, str) or linear is None:
        return False
    return not library.gemm(LINEARS(0, 1, 1) + CALL_ARGUMENTS(0, 0, 0, 0, 0, FLOAT32) + linear.packed)
