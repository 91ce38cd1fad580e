"""GGUF block types of fewer than four bits, or with values from a table, as the stored tensors of int4 and int8 in groups.

Each value of these types is a small integer times the scale of its group. The scales are computed here in the same order of operations as
by the gguf library, which also computes the values. So the integers are exact, and the engine computes the same float32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from stoker.quant import groups

Kind = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]


def _fields(raw: Array, *sizes: int) -> list[Array]:
    """The fields of each block, each [blocks, size]. `sizes` are in bytes."""
    blocks = raw.reshape(-1, sum(sizes))
    return [np.ascontiguousarray(field) for field in np.split(blocks, np.cumsum(sizes)[:-1], axis=1)]


def _float16(field: Array) -> Any:
    """A field of float16 as float32."""
    return field.view(np.float16).astype(np.float32)


def _nibbles(field: Array) -> Any:
    """The nibbles of each byte, the low one first: [blocks, 2 × bytes]."""
    return np.stack((field & 15, field >> 4), axis=-1).reshape(len(field), -1).astype(np.float32)


def _q3_k(raw: Array) -> Any:
    """Scales of Q3_K: 16 groups of 16 with 6-bit scales."""
    _, _, scales, d = _fields(raw, 32, 64, 12, 2)
    low = np.concatenate((scales[:, :8] & 15, scales[:, :8] >> 4), axis=1)
    high = np.concatenate([scales[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _float16(d) * ((low | high << 4).astype(np.int8) - np.int8(32)).astype(np.float32)


def _iq2_xxs(raw: Array) -> Any:
    """Scales of IQ2_XXS: 8 groups of 32, with the upper four bits of each second word."""
    d, qs = _fields(raw, 2, 64)
    return _float16(d) * (np.float32(0.5) + (qs.view(np.uint32)[:, 1::2] >> 28).astype(np.float32)) * np.float32(0.25)


def _iq2_xs(raw: Array) -> Any:
    """Scales of IQ2_XS: 16 groups of 16."""
    d, _, scales = _fields(raw, 2, 64, 8)
    return _float16(d) * (np.float32(0.5) + _nibbles(scales)) * np.float32(0.25)


def _iq2_s(raw: Array) -> Any:
    """Scales of IQ2_S: 16 groups of 16."""
    d, _, scales = _fields(raw, 2, 72, 8)
    return _float16(d) * (np.float32(0.5) + _nibbles(scales)) * np.float32(0.25)


def _iq3_xxs(raw: Array) -> Any:
    """Scales of IQ3_XXS: 8 groups of 32."""
    d, _, scales = _fields(raw, 2, 64, 32)
    return _float16(d) * (np.float32(0.5) + (scales.view(np.uint32) >> 28).astype(np.float32)) * np.float32(0.5)


def _iq3_s(raw: Array) -> Any:
    """Scales of IQ3_S: 8 groups of 32."""
    d, _, scales = _fields(raw, 2, 104, 4)
    return _float16(d) * (1 + 2 * _nibbles(scales))


def _iq1_s(raw: Array) -> Any:
    """Scales of IQ1_S: 8 groups of 32. Values are multiples of 1/8 of its scale."""
    d, _, qh = _fields(raw, 2, 32, 16)
    return _float16(d) * (2 * (qh.view(np.uint16) >> 12 & 7) + 1).astype(np.float32) / 8


def _iq1_m(raw: Array) -> Any:
    """Scales of IQ1_M: 16 groups of 16. Values are multiples of 1/8 of its scale, and the scale of a block is spread over four words."""
    _, _, scales = _fields(raw, 32, 16, 8)
    words = scales.view(np.uint16)
    d = np.bitwise_or.reduce((words & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], dtype=np.uint16), axis=1)
    groups_of_word = words[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7
    return _float16(d[:, None].astype(np.uint16)) * (2 * groups_of_word.reshape(len(words), -1) + 1).astype(np.float32) / 8


def _iq4_nl(raw: Array) -> Any:
    """Scales of IQ4_NL: one group of 32."""
    return _float16(_fields(raw, 2, 16)[0])


def _iq4_xs(raw: Array) -> Any:
    """Scales of IQ4_XS: 8 groups of 32 with 6-bit scales."""
    d, high, low, _ = _fields(raw, 2, 2, 4, 128)
    high_bits = high.view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return _float16(d) * (_nibbles(low) + 16 * high_bits.astype(np.float32) - 32)


def _q8_k(raw: Array) -> Any:
    """Scales of Q8_K: one group of 256."""
    return _fields(raw, 4, 256, 32)[0].view(np.float32)


def _tq1_0(raw: Array) -> Any:
    """Scales of TQ1_0: one group of 256."""
    return _float16(_fields(raw, 52, 2)[1])


def _tq2_0(raw: Array) -> Any:
    """Scales of TQ2_0: one group of 256."""
    return _float16(_fields(raw, 64, 2)[1])


# Block type → (scales of all groups from raw bytes, values of a group).
SCALES: dict[Kind, tuple[Callable[[Array], Array], int]] = {
    Kind.Q3_K: (_q3_k, 16), Kind.Q8_K: (_q8_k, 256), Kind.IQ1_S: (_iq1_s, 32), Kind.IQ1_M: (_iq1_m, 16), Kind.IQ2_XXS: (_iq2_xxs, 32),
    Kind.IQ2_XS: (_iq2_xs, 16), Kind.IQ2_S: (_iq2_s, 16), Kind.IQ3_XXS: (_iq3_xxs, 32), Kind.IQ3_S: (_iq3_s, 32),
    Kind.IQ4_NL: (_iq4_nl, 32), Kind.IQ4_XS: (_iq4_xs, 32), Kind.TQ1_0: (_tq1_0, 256), Kind.TQ2_0: (_tq2_0, 256),
}  # fmt: skip


def dequantize_blocks(raw: Array, kind: Kind) -> Array:
    """Float32 [rows, columns] from raw uint8 [rows, row_bytes], for every block type of weights."""
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are rejected when they are written
        if kind != Kind.Q8_K:  # the library has no function for it
            values: Array = gguf.quants.dequantize(raw, kind)
            return values
        d, qs, _ = _fields(raw, 4, 256, 32)
        return (d.view(np.float32) * qs.view(np.int8).astype(np.float32)).reshape(len(raw), -1)


def _scaled_integers(raw: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(int8 [rows, columns], float32 scales [rows, groups]) of the values in `raw` [rows, row_bytes]."""
    read_scales, group = SCALES[kind]
    array = raw.contiguous().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        scale = torch.from_numpy(np.ascontiguousarray(read_scales(array))).view(len(raw), -1)
    values = torch.from_numpy(dequantize_blocks(array, kind)).unflatten(-1, (-1, group))
    divisor = torch.where(scale == 0, 1.0, scale)
    return (values / divisor[..., None]).round().to(torch.int8).flatten(-2), scale


def as_int8(kind: Kind) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function from raw bytes [rows, row_bytes] to the stored tensors of int8 in groups with float32 scales."""

    def repack(raw: Tensor) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        values, scale = _scaled_integers(raw, kind)
        return {"weight": values, "scale": scale}

    return repack


def as_int4(kind: Kind) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function from raw bytes [rows, row_bytes] to the stored tensors of int4 in groups with float32 scales."""

    def repack(raw: Tensor) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        values, scale = _scaled_integers(raw, kind)
        return {"weight": groups.pack(values.add(8).view(torch.uint8)), "scale": scale}

    return repack
