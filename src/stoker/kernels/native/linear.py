"""Linears by the C kernels, with their norm, gates, bias and residual.

A few rows of dense, int8, int4 and e4m3 weights run in linear.c. With more rows, float32 and e4m3 weights run in gemm.c, and weights in
groups are widened for PyTorch's product. Weights in groups are read in blocks where the processor has AVX512-VNNI (blocks.py).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import (
    ABSENT,
    ACTIVATIONS,
    BFLOAT16,
    CALL_ARGUMENTS,
    E4M3,
    FLOAT16,
    FLOAT32,
    INT8,
    LINEAR_ARGUMENTS,
    LINEARS,
    NORMS,
    ROUNDINGS,
    UINT8,
    WIDENING,
    TensorInfo,
    kernels,
    tensor_info,
)
from stoker.kernels.reference import linear as reference
from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

WIDENED = 1 << 18  # weights that are widened at a time: 1 MiB of float32
# Of dense weights in linear.c; with more, PyTorch's product is as fast, except those of `_is_faster_in_gemm`. Float32 [3072, 576] from
# memory on a Zen 3 core with AVX2, µs here and in PyTorch: 1 row 510 and 550, 8 rows 890 and 1,176, 16 rows 1,249 and 1,510.
MAX_ROWS = 16
MIN_GEMM_ROWS = 128  # of float32 weights in gemm.c
# With more, gemm.c is faster: 8 rows × e4m3 [3072, 576] need 410 µs there and 580 µs in linear.c, 4 rows 400 and 300 µs.
MAX_FP8_ROWS = 4
# With more, `_widened_product` is faster: 64 rows × int4 [3072, 576] need 1.2 ms there and 2.5 ms in `product`, 16 rows 0.6 ms in both.
MAX_GROUPED_ROWS = 16
MAX_GROUPS = 1024  # of a row, as in linear.h
_MAX_LINEAR_ROWS = {FLOAT32: MAX_ROWS, E4M3: MAX_FP8_ROWS}  # by the dtype of weights that gemm.c supports
FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
ACTIVATION_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class NativeWeight(NamedTuple):
    """A weight as the kernel reads it: see linear.h for the layouts."""

    values: TensorInfo
    scale: TensorInfo = ABSENT
    zero: TensorInfo = ABSENT
    offset: TensorInfo = ABSENT
    group: int = 0  # features that share a scale; 0: all features of a row
    is_fp4: bool = False  # of uint8 values: whether their four bits are e2m1
    rounding: int = 0  # of activations to e4m3: a number of ROUNDINGS
    input_scale: TensorInfo = ABSENT  # of activations that are rounded with a static scale
    blocks: tuple[int, int] | None = None  # [n, k] of a weight in blocks, of which scale, zero and offset are parts


class PackedLinear(NamedTuple):
    """A linear's arguments that are the same for every call."""

    inputs: int  # features of x
    outputs: int
    packed: bytes  # LINEAR_ARGUMENTS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """A dense linear (`ops.linear`) by the C kernels where they are faster, otherwise by the reference."""
    is_native = x.shape[0] <= MAX_ROWS or _is_faster_in_gemm(x, weight, fusion)
    native = dense_weight(weight) if is_native else None
    y = product(x, native, bias, fusion) if native is not None else None
    return reference.linear(x, weight, bias, fusion) if y is None else y


def _is_faster_in_gemm(x: Tensor, weight: Tensor, fusion: Fusion) -> bool:
    """Whether gemm.c computes a dense linear faster than PyTorch: float32, many rows, and a norm or gate to fuse or a weight like a head's.

    On a Zen 4 core, 1,024 rows × [960, 576] with a norm reach 90 GFLOP/s and 80 in PyTorch, with a norm and a gate 100 and 78. Without
    either, 1,024 rows × [576, 1536] reach 84 and 90. On a Zen 3 core (AVX2) the products alone are equal: 87 and 88 for [960, 576].
    """
    rows, features = weight.shape
    is_fused = fusion.norm_kind is not None or fusion.gate is not None
    return weight.dtype == torch.float32 and x.shape[0] >= MIN_GEMM_ROWS and (is_fused or rows >= 16 * features)


def dense_weight(weight: Tensor) -> NativeWeight | None:
    """Kernel argument of a dense weight [n, k] of float32 or bfloat16. None when the kernel does not support the weight."""
    info = tensor_info(weight)
    return NativeWeight(info) if info.dtype in (FLOAT32, BFLOAT16) else None


def int8_weight(weight: PackedWeight) -> NativeWeight | None:
    """Kernel argument of a weight int8 [n, k] with scale float32 [n], or None if not supported."""
    values, scales = tensor_info(weight.values), tensor_info(weight.scale)
    fits = values.dtype == INT8 and scales.dtype == FLOAT32 and scales.shape == values.shape[:1]
    return NativeWeight(values, scales) if fits else None


def fp8_weight(weight: PackedWeight) -> NativeWeight | None:
    """Kernel argument of a weight float8_e4m3fn [n, k] with scale float32 [n] and rounded activations, or None if not supported."""
    values, scales, static = tensor_info(weight.values), tensor_info(weight.scale), tensor_info(weight.input_scale)
    fits = values.dtype == E4M3 and scales.dtype == FLOAT32 and scales.shape == values.shape[:1] and not weight.group_size
    if weight.activations == "static":
        fits = fits and static.dtype == FLOAT32 and static.numel == 1
    else:
        fits = fits and weight.activations == "token" and static is ABSENT
    return NativeWeight(values, scales, rounding=ROUNDINGS[weight.activations], input_scale=static) if fits else None


def grouped_int8_weight(weight: PackedWeight) -> NativeWeight | None:
    """Kernel argument of a weight int8 [n, k] with scale and offset [n, ceil(k / group)], or None if not supported."""
    if weight.layout == "blocks":
        return cast(NativeWeight, weight.device_data)
    native = _grouped_weight(weight)
    return native if native.values.dtype == INT8 and native.zero is ABSENT and _has_group_scales(native, 1) else None


def int4_weight(weight: PackedWeight) -> NativeWeight | None:
    """The kernel argument for an int4 weight, or None if the kernel does not support it, as it does not FP4 with scales of rows.

    The weight is uint8 [n, k / 2], with scales and, optionally, either zeros or offsets, each [n, ceil(k / group)].
    """
    if weight.layout == "blocks":
        return cast(NativeWeight, weight.device_data)
    if weight.row_scale is not None:
        return None
    native = _grouped_weight(weight)._replace(is_fp4=weight.is_fp4)
    return native if native.values.dtype == UINT8 and _has_group_scales(native, 2) else None


def _grouped_weight(weight: PackedWeight) -> NativeWeight:
    """Kernel argument of a weight with groups, not checked yet. A float `zero` is passed as an offset, an integer one as a zero point."""
    zero, offset = (ABSENT, tensor_info(weight.zero)) if weight.zero_kind == "float" else (tensor_info(weight.zero), ABSENT)
    return NativeWeight(tensor_info(weight.values), tensor_info(weight.scale), zero, offset, weight.group_size)


def _has_group_scales(weight: NativeWeight, features_per_byte: int) -> bool:
    """Whether scales, zeros and offsets have the shape and type that the kernel reads."""
    shape, scale, group = weight.values.shape, weight.scale, weight.group
    if len(shape) != 2 or group <= 0 or group % (16 * features_per_byte):
        return False
    grid = shape[0], -(-features_per_byte * shape[1] // group)
    fits = grid[1] <= MAX_GROUPS and scale.shape == grid and scale.dtype in FLOATS
    fits = fits and (weight.zero is ABSENT or (weight.zero.shape == grid and weight.zero.dtype == UINT8))
    return fits and (weight.offset is ABSENT or (weight.offset.shape == grid and weight.offset.dtype == scale.dtype))


def pack_linear(weight: NativeWeight, bias: Tensor | None, fusion: Fusion) -> PackedLinear | None:
    """The arguments of one linear as a C struct. None when the kernel does not support the weight, the bias or the fusion.

    The fusion's residual is not included, because it is an argument of each call.
    """
    gate, input_gate = ACTIVATIONS.get(fusion.gate, -1), ACTIVATIONS.get(fusion.input_gate, -1)
    if gate < 0 or input_gate < 0 or len(weight.values.shape) != 2:
        return None
    out, size = weight.blocks or weight.values.shape
    size *= 2 if weight.values.dtype == UINT8 and weight.blocks is None else 1
    added, norm_weight, norm_bias = tensor_info(bias), tensor_info(fusion.norm_weight), tensor_info(fusion.norm_bias)
    if not (is_vector(added, out) and is_vector(norm_weight, size) and is_vector(norm_bias, size)):
        return None
    out //= 2 if gate else 1
    packed = LINEAR_ARGUMENTS(
        weight.values.address,
        weight.scale.address,
        weight.zero.address,
        weight.offset.address,
        added.address,
        norm_weight.address,
        norm_bias.address,
        weight.input_scale.address,
        size,
        out,
        weight.values.dtype,
        weight.scale.dtype,
        weight.group,
        weight.is_fp4,
        weight.blocks is not None,
        added.dtype,
        norm_weight.dtype,
        norm_bias.dtype,
        NORMS[fusion.norm_kind],
        input_gate,
        gate,
        weight.rounding,
        fusion.norm_eps,
    )
    return PackedLinear(2 * size if input_gate else size, out, packed)


def product(x: Tensor, weight: NativeWeight, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """`fusion` applied to x × weightᵀ + bias by the kernel, or None when the kernel does not support the arguments."""
    library, dtype, residual = kernels(), ACTIVATION_DTYPES.get(x.dtype, -1), fusion.residual
    if isinstance(library, str) or dtype < 0 or x.dim() != 2 or x.stride(1) != 1:
        return None
    own = pack_linear(weight, bias, fusion)
    if own is None or x.shape[1] != own.inputs:
        return None
    rows = x.shape[0]
    if residual is not None and not (
        residual.shape == (rows, own.outputs) and residual.dtype == x.dtype and residual.is_contiguous() and residual.is_cpu
    ):
        return None
    y = torch.empty(rows, own.outputs, dtype=x.dtype)
    added = 0 if residual is None else residual.data_ptr()
    header = LINEARS(library.fork, torch.get_num_threads(), 1)
    run = library.gemm if rows > _MAX_LINEAR_ROWS.get(weight.values.dtype, MAX_GROUPED_ROWS) else library.linears
    status = run(header + CALL_ARGUMENTS(x.data_ptr(), added, y.data_ptr(), rows, x.stride(0), dtype) + own.packed)
    return None if status else y


def grouped_product(x: Tensor, weight: NativeWeight | None, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """The linear with a weight in groups, or None when it is not supported. Blocks are always supported.

    More than MAX_GROUPED_ROWS rows are computed by `_widened_product` where gemm.c does not support the processor, and blocks also where
    `product` does not support an argument, because no reference reads them.
    """
    if weight is None:
        return None
    y = product(x, weight, bias, fusion)
    return _widened_product(x, weight, bias, fusion) if y is None and (weight.blocks or x.shape[0] > MAX_GROUPED_ROWS) else y


def _widened_product(x: Tensor, weight: NativeWeight, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """The linear with a weight in groups, or None when the kernel does not support the arguments.

    Slices of the weight that fit the L2 cache are widened to float32, one after another, and multiplied there by PyTorch.
    """
    library, own = kernels(), pack_linear(weight, None, PLAIN)
    if isinstance(library, str) or own is None or x.shape[-1] != own.inputs * (1 if fusion.input_gate is None else 2):
        return None
    fork, arguments, threads = library.fork, CALL_ARGUMENTS(0, 0, 0, 0, 0, FLOAT32) + own.packed, torch.get_num_threads()
    slice_rows = max(WIDENED // own.inputs // 16, 1) * 16
    wide = torch.empty(min(slice_rows, own.outputs), own.inputs)

    def multiply(rows: Tensor) -> Tensor:
        """rows × weightᵀ + bias: widen one slice of the weight after another, and multiply it in float32."""
        rows, y = rows.float(), torch.empty(rows.shape[0], own.outputs)
        for first in range(0, own.outputs, slice_rows):
            count = min(slice_rows, own.outputs - first)
            status = library.widen(WIDENING(fork, threads, wide.data_ptr(), 0, first, count) + arguments)
            assert not status, "_has_group_scales accepts only what the kernel supports"
            torch.mm(rows, wide[:count].t(), out=y[:, first : first + count])
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    return around(x, fusion, multiply)


def widened_rows(weight: NativeWeight | None, ids: Tensor) -> Tensor | None:
    """The rows `ids` int32 [T] of a weight in groups, float32 [T, features], or None when they are not supported."""
    library, own = kernels(), None if weight is None else pack_linear(weight, None, PLAIN)
    if isinstance(library, str) or own is None or ids.dtype != torch.int32 or not ids.is_contiguous():
        return None
    out = torch.empty(ids.shape[0], own.inputs)
    header = WIDENING(library.fork, torch.get_num_threads(), out.data_ptr(), ids.data_ptr(), 0, ids.shape[0])
    return None if library.widen(header + CALL_ARGUMENTS(0, 0, 0, 0, 0, FLOAT32) + own.packed) else out


def is_vector(info: TensorInfo, size: int) -> bool:
    """Whether a tensor is absent or has `size` floats."""
    return info is ABSENT or (info.numel == size and info.dtype in FLOATS)
