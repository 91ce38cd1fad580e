"""The fused layer for few rows in one call: linears follow each other without coming back to Python, and threads wait awake."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import CALL_ARGUMENTS, LINEARS, kernels
from stoker.kernels.native.linear import (
    ACTIVATION_DTYPES,
    MAX_GROUPED_ROWS,
    MAX_ROWS,
    NativeWeight,
    PackedLinear,
    dense_weight,
    grouped_int8_weight,
    int4_weight,
    int8_weight,
    pack_linear,
)
from stoker.kernels.native.quant_int8 import max_rows as max_int8_rows
from stoker.kernels.reference import fused_layer as reference
from stoker.kernels.types import FusedLayer, FusedLinear


class Chain(NamedTuple):
    """The linears of a fused layer, and how many rows all of them take."""

    links: tuple[PackedLinear, ...]
    most: int


_chains: dict[int, tuple[weakref.ref[FusedLayer], Chain | None]] = {}


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    chain = _chain(layer)
    return chain is not None and rows <= chain.most


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """See `ops.fused_layer`. What the kernel does not take goes one after another."""
    found, chain, dtype = kernels(), _chain(layer), ACTIVATION_DTYPES.get(x.dtype, -1)
    fits = dtype >= 0 and residual.dtype == x.dtype and residual.is_contiguous() and x.stride(1) == 1
    if isinstance(found, str) or chain is None or not fits or x.shape[0] > chain.most or x.shape[1] != chain.links[0].inputs:
        return reference.fused_layer(x, residual, layer)
    rows, (out, up, down, *last) = x.shape[0], chain.links
    between = torch.empty(rows, out.outputs + up.outputs, dtype=x.dtype)  # the residual after attention, and the inner features
    after, qkv = torch.empty_like(residual), torch.empty(rows, last[0].outputs, dtype=x.dtype) if last else None
    middle, end = between.data_ptr(), after.data_ptr()
    inner = middle + rows * out.outputs * x.element_size()
    data = b"".join((
        LINEARS(found.fork, torch.get_num_threads(), len(chain.links)),
        CALL_ARGUMENTS(x.data_ptr(), residual.data_ptr(), middle, rows, x.stride(0), dtype), out.packed,
        CALL_ARGUMENTS(middle, 0, inner, rows, up.inputs, dtype), up.packed,
        CALL_ARGUMENTS(inner, middle, end, rows, down.inputs, dtype), down.packed,
        *((CALL_ARGUMENTS(end, 0, qkv.data_ptr(), rows, last[0].inputs, dtype), last[0].packed) if qkv is not None else ()),
    ))  # fmt: skip
    return reference.fused_layer(x, residual, layer) if found.linears(data) else (after, qkv)


def _chain(layer: FusedLayer) -> Chain | None:
    """None where the kernel does not take a linear, or one does not begin with what the one before gives."""
    key = id(layer)
    found = _chains.get(key)
    if found is None or found[0]() is not layer:
        ref = weakref.ref(layer, lambda _: _chains.pop(key, None))
        found = _chains[key] = ref, _made(layer)
    return found[1]


def _made(layer: FusedLayer) -> Chain | None:
    links, most = [], []
    for linear in layer.linears:
        stored, rows = _stored(linear.weight)
        own = None if stored is None else _link(stored, linear)
        if own is None:
            return None
        links.append(own)
        most.append(rows)
    hidden = links[0].outputs
    begins = [hidden, links[1].outputs, hidden][: len(links) - 1]
    return Chain(tuple(links), min(most)) if [own.inputs for own in links[1:]] == begins and links[2].outputs == hidden else None


def _link(stored: NativeWeight, linear: FusedLinear) -> PackedLinear | None:
    assert linear.weight is not None
    return pack_linear(stored, linear.weight.bias, linear.fusion)


def _stored(weight: PackedWeight | None) -> tuple[NativeWeight | None, int]:
    """The weight as the kernel reads it, and how many rows do better so than one linear at a time."""
    if weight is None or weight.column_order is not None or weight.activations != "none":
        return None, 0
    if weight.format == "dense":
        return dense_weight(weight.values), MAX_ROWS
    if weight.format == "int8" and not weight.group_size:
        return int8_weight(weight), max_int8_rows()
    if weight.format == "int8":
        return grouped_int8_weight(weight), MAX_GROUPED_ROWS
    return (int4_weight(weight), MAX_GROUPED_ROWS) if weight.format == "int4" else (None, 0)
