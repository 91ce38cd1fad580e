"""The product of `skinny.kernel` as Triton operations on tiles, for Triton's interpreter, which has no matrix instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.ptx.unpack import unpack_int4


@triton.jit
def dequantized_products(
    x,  # QuantizedTokens
    weight,  # QuantizedWeight
    rows,  # [R], below the number of weight rows
    tokens,  # [T], below m
    begin,  # chunks
    end,
    m,
    FORMAT: tl.constexpr,  # WeightFormat
):
    """float32 [R, T]: the product of R rows and T tokens over the chunks begin : end, with dequantized weights."""
    FORM: tl.constexpr = FORMAT.form
    ZERO: tl.constexpr = FORMAT.zero
    GROUP: tl.constexpr = FORMAT.group
    DIGITS: tl.constexpr = 1 if FORM == "fp8" else 2
    PARTS: tl.constexpr = GROUP // 64 if FORM == "int4" and GROUP > 64 else 1
    acc = tl.zeros([rows.shape[0], tokens.shape[0]], tl.float32)
    for part in range(begin * PARTS, end * PARTS):
        byte = part * 64 + tl.arange(0, 64)  # within the row
        values_ptr = weight.values_ptr + rows[:, None].to(tl.int64) * weight.stride_row + byte[None, :]  # [R, 64]
        for side in tl.static_range(2 if FORM == "int4" else 1):
            group = 2 * (byte // GROUP) + side
            features = group * GROUP + byte % GROUP if FORM == "int4" else byte  # [64]
            v = tl.zeros([64, tokens.shape[0]], tl.float32)
            for digit in tl.static_range(DIGITS):
                stored = tl.load(x.values_ptr + (digit * m + tokens)[None, :] * x.stride_row + features[:, None])
                v = v * 254.0 + stored.to(tl.float32)
            if FORM == "int4":
                low, high = unpack_int4(tl.load(values_ptr), False)
                offsets = group[None, :] * weight.stride_group + rows[:, None]  # [R, 64]
                scale = tl.load(weight.scale_ptr + offsets).to(tl.float32)
                w = (low if side == 0 else high).to(tl.float32)
                if ZERO == "none":
                    w = (w - 8.0) * scale
                elif ZERO == "int":
                    w = (w - tl.load(weight.zero_ptr + offsets).to(tl.float32)) * scale
                else:
                    w = w * scale + tl.load(weight.zero_ptr + offsets).to(tl.float32)
            else:
                w = tl.load(values_ptr).to(tl.float32)
            acc += tl.dot(w, v, input_precision="ieee")
    return acc
