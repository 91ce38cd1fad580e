"""What `fragments` asks of a device, for the interpreter: loads of 16 bytes a lane, and matrix instructions over a warp's registers.

Operands lie where PTX puts them ("Warp Level Matrix Multiply-Accumulate Instructions", m16n8k16 of 16-bit and m16n8k32 of 8-bit types),
so that a kernel's register branch can be checked where there is no device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from emulated.products import Register, multiply
from triton.runtime.interpreter import TensorHandle

from stoker.kernels.triton.gemm.skinny import kernel as stream_kernel
from stoker.kernels.triton.gemm.skinny import launch as stream
from stoker.kernels.triton.gemm.skinny_int4 import kernel as band_kernel


def install(patch: pytest.MonkeyPatch) -> None:
    """Streamed linears take their register branch, and linears in bands run, until the patch is undone."""
    kernel = stream.stream_kernel

    class InRegisters:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: kernel[grid](*args, **{**kwargs, "PACKED": True})

    patch.setattr(stream, "stream_kernel", InRegisters())
    functions = {
        "load_weight_fragment": _load, "load_token_fragment": _load, "load_fragment": _load_fragment, "e4m3_to_f16": _e4m3_to_f16,
        "dequantize_int4": _dequantize_int4, "mma_m16n8": _mma_m16n8,
    }  # fmt: skip
    for kernels in (stream_kernel, band_kernel):
        for name in functions.keys() & vars(kernels).keys():
            patch.setattr(kernels, name, functions[name])


def _tensor(data: Register, dtype: tl.dtype) -> tl.tensor:
    data = np.ascontiguousarray(data)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _load(address: tl.tensor, inside: tl.tensor, OFFSET: Any = 0) -> tuple[tl.tensor, ...]:
    pairs = zip(address.handle.data.ravel(), inside.handle.data.ravel(), strict=True)
    offset = getattr(OFFSET, "value", OFFSET)
    words = np.frombuffer(b"".join(ctypes.string_at(int(at) + offset, 16) if there else bytes(16) for at, there in pairs), np.int32)
    return tuple(_tensor(column, tl.int32) for column in words.reshape(-1, 4).T)


def _load_fragment(address: tl.tensor, OFFSET: Any) -> tuple[tl.tensor, ...]:
    return _load(address, address, OFFSET)


def _e4m3_to_f16(codes: tuple[tl.tensor, ...]) -> tuple[tl.tensor, ...]:
    return tuple(_tensor(word, tl.int32) for code in codes for word in _halves(code.handle.data.ravel()))


def _halves(codes: Register) -> Register:
    """Two registers of float16 of one of e4m3."""
    values = torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn).half()
    return values.numpy().view(np.int32).reshape(-1, 2).T


def _dequantize_int4(words: tuple[tl.tensor, ...], grid: tuple[tl.tensor, ...], SIDE: Any, XTYPE: Any, ZERO: Any) -> tuple[tl.tensor, ...]:
    side, name, zero = (getattr(part, "value", part) for part in (SIDE, XTYPE, ZERO))
    dtype = getattr(torch, name)
    first, *second = (torch.from_numpy(part.handle.data.astype(np.float32)) for part in _plain(grid))
    made = []
    for word in words:
        codes = torch.from_numpy(word.handle.data.view(np.uint8).reshape(-1, 4).astype(np.int32)) >> (4 * side) & 15
        for chosen in ([0, 2], [1, 3]):
            values = codes[:, chosen].to(dtype)
            low = torch.zeros(len(values), 1)
            if zero == "float":
                low = second[0][:, None]
            else:
                values = values - (torch.full((1, 1), 8.0) if zero == "none" else second[0][:, None]).to(dtype)
            exact = values.float() * first[:, None].to(dtype).float() + low.to(dtype).float()
            made.append(_tensor(exact.to(dtype).view(torch.int32).numpy().ravel(), tl.int32))
    return tuple(made)


def _plain(grid: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """bfloat16, of which the interpreter keeps the bits, as float32."""
    return [part.to(tl.float32) for part in grid]


def _mma_m16n8(
    sums: tuple[tl.tensor, ...], upper: tuple[tl.tensor, ...], lower: tuple[tl.tensor, ...], tokens: tuple[tl.tensor, ...], KIND: Any
) -> tuple[tl.tensor, ...]:
    kind = getattr(KIND, "value", KIND)
    u, v, t = ([np.ascontiguousarray(part.handle.data.ravel()).view(np.uint32) for part in parts] for parts in (upper, lower, tokens))
    total = [part.handle.data.ravel() for part in sums]
    if kind == "e4m3":
        for i in range(4):
            (a, c), (b, d) = _halves(u[i]), _halves(v[i])
            total = multiply((a, b, c, d), (t[2 * i], t[2 * i + 1]), total, torch.float16, torch.float16)
    else:
        shift = 4 if kind == "high" else 0
        if kind in ("low", "high"):
            u, v = ([(word >> shift) & 0x0F0F0F0F for word in words] for words in (u, v))
        dtype = getattr(torch, kind) if kind in ("bfloat16", "float16") else torch.int8
        for i in (0, 2):
            total = multiply((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1]), total, dtype, dtype)
    return tuple(_tensor(part, sums[0].dtype.scalar) for part in total)
