"""The fused layer by the C kernel (linear.c): all linears between two attentions in one call, for up to 16 rows.

That saves the Python code between linears, and threads spin between them instead of sleeping.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import CALL_ARGUMENTS, LINEARS, kernels
from stoker.kernels.native.linear import (
    ACTIVATION_DTYPES,
    MAX_FP8_ROWS,
    MAX_GROUPED_ROWS,
    MAX_ROWS,
    NativeWeight,
    PackedLinear,
    dense_weight,
    fp8_weight,
    grouped_int8_weight,
    int4_weight,
    int8_weight,
    pack_linear,
)
from stoker.kernels.native.quant_int8 import max_rows as max_int8_rows
from stoker.kernels.reference import fused_layer as reference
from stoker.kernels.types import FusedLayer, FusedLinear


class PackedLayer(NamedTuple):
    """The linears of a fused layer as kernel arguments."""

    linears: tuple[PackedLinear, ...]  # output projection, gate and up, down; then the next layer's QKV projection, if there is one
    max_rows: int  # up to which the kernel supports every linear, and is faster than one linear after another


_packed_layers: dict[int, tuple[weakref.ref[FusedLayer], PackedLayer | None]] = {}


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """Whether the C kernel computes a fused layer for `rows` rows (`ops.supports_fused_layer`)."""
    packed = _packed_layer(layer)
    return packed is not None and rows <= packed.max_rows


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """All linears of a fused layer (`ops.fused_layer`) in one call of C.

    The reference runs when the kernel does not support the arguments.
    """
    library, packed, dtype = kernels(), _packed_layer(layer), ACTIVATION_DTYPES.get(x.dtype, -1)
    is_supported = dtype >= 0 and residual.dtype == x.dtype and residual.is_contiguous() and x.stride(1) == 1
    if isinstance(library, str) or packed is None or not is_supported:
        return reference.fused_layer(x, residual, layer)
    if x.shape[0] > packed.max_rows or x.shape[1] != packed.linears[0].inputs:
        return reference.fused_layer(x, residual, layer)
    rows, (out, up, down, *last) = x.shape[0], packed.linears
    scratch = torch.empty(rows, out.outputs + up.outputs, dtype=x.dtype)  # the residual stream after attention, then the MLP's features
    result, qkv = torch.empty_like(residual), torch.empty(rows, last[0].outputs, dtype=x.dtype) if last else None
    stream, end = scratch.data_ptr(), result.data_ptr()
    inner = stream + rows * out.outputs * x.element_size()
    arguments = [
        LINEARS(library.fork, torch.get_num_threads(), len(packed.linears)),
        CALL_ARGUMENTS(x.data_ptr(), residual.data_ptr(), stream, rows, x.stride(0), dtype),
        out.packed,
        CALL_ARGUMENTS(stream, 0, inner, rows, up.inputs, dtype),
        up.packed,
        CALL_ARGUMENTS(inner, stream, end, rows, down.inputs, dtype),
        down.packed,
    ]
    if qkv is not None:
        arguments += [CALL_ARGUMENTS(end, 0, qkv.data_ptr(), rows, last[0].inputs, dtype), last[0].packed]
    status = library.linears(b"".join(arguments))
    return reference.fused_layer(x, residual, layer) if status else (result, qkv)


def _packed_layer(layer: FusedLayer) -> PackedLayer | None:
    """The result of `_pack_layer(layer)`, cached for as long as the layer exists."""
    key = id(layer)
    entry = _packed_layers.get(key)
    if entry is None or entry[0]() is not layer:
        ref = weakref.ref(layer, lambda _: _packed_layers.pop(key, None))
        entry = _packed_layers[key] = ref, _pack_layer(layer)
    return entry[1]


def _pack_layer(layer: FusedLayer) -> PackedLayer | None:
    """The kernel arguments of a layer. None when a linear is not supported, its outputs are not the inputs of the next one, or its results
    are summed over ranks.
    """
    if layer.group.size > 1:
        return None
    packed, max_rows = [], []
    for linear in layer.linears:
        weight, rows = _native_weight(linear.weight)
        own = None if weight is None else _pack(weight, linear)
        if own is None:
            return None
        packed.append(own)
        max_rows.append(rows)
    hidden = packed[0].outputs
    inputs = [hidden, packed[1].outputs, hidden][: len(packed) - 1]
    if [own.inputs for own in packed[1:]] != inputs or packed[2].outputs != hidden:
        return None
    return PackedLayer(tuple(packed), min(max_rows))


def _pack(weight: NativeWeight, linear: FusedLinear) -> PackedLinear | None:
    """The kernel arguments of one linear, or None when the kernel does not support its bias or fusion."""
    assert linear.weight is not None
    return pack_linear(weight, linear.weight.bias, linear.fusion)


def _native_weight(weight: PackedWeight | None) -> tuple[NativeWeight | None, int]:
    """The weight as the kernel reads it, or None if it is not supported, and the largest number of rows for which the kernel is faster."""
    if weight is None or weight.column_order is not None:
        return None, 0
    if weight.format == "fp8":
        return fp8_weight(weight), MAX_FP8_ROWS
    if weight.activations != "none":
        return None, 0
    if weight.format == "dense":
        return dense_weight(weight.values), MAX_ROWS
    if weight.format == "int8" and not weight.group_size:
        return int8_weight(weight), max_int8_rows()
    if weight.format == "int8":
        return grouped_int8_weight(weight), MAX_GROUPED_ROWS
    return (int4_weight(weight), MAX_GROUPED_ROWS) if weight.format == "int4" else (None, 0)
