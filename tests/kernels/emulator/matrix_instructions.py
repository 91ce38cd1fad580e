"""The inline PTX of the skinny GEMM kernels in numpy, so that their register branch runs in Triton's interpreter.

It replaces the loads of 16 bytes per lane, the conversions, and `mma.sync` over the registers of a warp. Operands are where the PTX ISA
puts them ("Warp Level Matrix Multiply-Accumulate Instructions", m16n8k16 of 16-bit and m16n8k32 of 8-bit types), so a wrong lane or
register in a kernel gives a wrong result.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from emulated.products import Register, multiply_accumulate
from triton.runtime.interpreter import TensorHandle

from stoker.kernels.reference.quant_int4 import FP4_VALUES
from stoker.kernels.triton.gemm.skinny import chunk_products, fragments, launch
from stoker.kernels.triton.gemm.skinny_int4 import kernel as int4_kernel


def install(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, skinny linears run their register branch, and int4 skinny linears can run at all."""
    kernel = launch.skinny_gemm_kernel

    class InRegisters:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: kernel[grid](*args, **{**kwargs, "IN_REGISTERS": True})

    patch.setattr(launch, "skinny_gemm_kernel", InRegisters())
    functions = {
        "load_weight_fragment": _load, "load_token_fragment": _load, "load_fragment": _load_fragment, "e4m3_to_f16": _e4m3_to_f16,
        "dequantize_int4": _dequantize_int4, "mma_m16n8": _mma_m16n8,
    }  # fmt: skip
    for module in (fragments, chunk_products, int4_kernel):
        for name in functions.keys() & vars(module).keys():
            patch.setattr(module, name, functions[name])


def _tensor(data: Register, dtype: tl.dtype) -> tl.tensor:
    data = np.ascontiguousarray(data)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _load(address: tl.tensor, mask: tl.tensor, OFFSET: Any = 0) -> tuple[tl.tensor, ...]:
    """Four int32 registers from the 16 bytes at `address` + OFFSET of each lane, zeros where `mask` is 0."""
    pairs = zip(address.handle.data.ravel(), mask.handle.data.ravel(), strict=True)
    offset = getattr(OFFSET, "value", OFFSET)
    loaded = b"".join(ctypes.string_at(int(start) + offset, 16) if is_loaded else bytes(16) for start, is_loaded in pairs)
    words = np.frombuffer(loaded, np.int32).reshape(-1, 4)
    return tuple(_tensor(column, tl.int32) for column in words.T)


def _load_fragment(address: tl.tensor, OFFSET: Any) -> tuple[tl.tensor, ...]:
    return _load(address, address, OFFSET)


def _e4m3_to_f16(words: tuple[tl.tensor, ...]) -> tuple[tl.tensor, ...]:
    return tuple(_tensor(half, tl.int32) for word in words for half in _f16_registers(word.handle.data.ravel()))


def _f16_registers(word: Register) -> Register:
    """Two registers of float16 pairs from one register of four e4m3 values."""
    values = torch.from_numpy(word.view(np.uint8).copy()).view(torch.float8_e4m3fn).half()
    return values.numpy().view(np.int32).reshape(-1, 2).T


def _dequantize_int4(
    words: tuple[tl.tensor, ...], scale_zero: tuple[tl.tensor, ...], SIDE: Any, XTYPE: Any, ZERO: Any
) -> tuple[tl.tensor, ...]:
    side, name, zero_kind = (getattr(part, "value", part) for part in (SIDE, XTYPE, ZERO))
    dtype = getattr(torch, name)
    # The interpreter holds bfloat16 as bit patterns; float32 has the values.
    scale, *zero = (torch.from_numpy(part.to(tl.float32).handle.data.astype(np.float32))[:, None] for part in scale_zero)
    result = []
    for word in words:
        nibbles = torch.from_numpy(word.handle.data.view(np.uint8).reshape(-1, 4).astype(np.int32)) >> (4 * side) & 15
        for byte_pair in ([0, 2], [1, 3]):
            values = (torch.tensor(FP4_VALUES)[nibbles[:, byte_pair]] if zero_kind == "e2m1" else nibbles[:, byte_pair]).to(dtype)
            offset = torch.zeros(len(values), 1)
            if zero_kind == "float":
                offset = zero[0]
            elif zero_kind != "e2m1":
                values = values - (torch.full((1, 1), 8.0) if zero_kind == "none" else zero[0]).to(dtype)
            exact = values.float() * scale.to(dtype).float() + offset.to(dtype).float()
            result.append(_tensor(exact.to(dtype).view(torch.int32).numpy().ravel(), tl.int32))
    return tuple(result)


def _mma_m16n8(
    acc: tuple[tl.tensor, ...], upper: tuple[tl.tensor, ...], lower: tuple[tl.tensor, ...], tokens: tuple[tl.tensor, ...], KIND: Any
) -> tuple[tl.tensor, ...]:
    kind = getattr(KIND, "value", KIND)
    u, v, t = ([np.ascontiguousarray(part.handle.data.ravel()).view(np.uint32) for part in parts] for parts in (upper, lower, tokens))
    sums = [part.handle.data.ravel() for part in acc]
    if kind == "e4m3":
        for i in range(4):
            (a, c), (b, d) = _f16_registers(u[i]), _f16_registers(v[i])
            sums = multiply_accumulate((a, b, c, d), (t[2 * i], t[2 * i + 1]), sums, torch.float16, torch.float16)
    else:
        shift = 4 if kind == "high" else 0
        if kind in ("low", "high"):
            u, v = ([(word >> shift) & 0x0F0F0F0F for word in words] for words in (u, v))
        dtype = getattr(torch, kind) if kind in ("bfloat16", "float16") else torch.int8
        for i in (0, 2):
            sums = multiply_accumulate((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1]), sums, dtype, dtype)
    return tuple(_tensor(part, acc[0].dtype.scalar) for part in sums)
