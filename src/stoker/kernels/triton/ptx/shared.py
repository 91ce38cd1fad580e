"""Loads and stores of shared memory by 32-bit address, and the address where a kernel's shared memory begins.

A fused layer kernel allocates its shared memory once and manages it itself: the allocation begins where the CTA's shared memory begins, and
what Triton needs for its own reductions comes after it (tests/kernels/compiled/test_compile.py checks this). An address is an int32 tensor
with one element per thread, in bytes. Gluon has no operation for this, so each access is inline PTX. An assembly block that only stores
returns one of its arguments, because a block must have a result.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import float32_registers, int32_registers, ptx, ptx_text


@gluon.jit
def shared_base(thread):
    """The address at which the kernel's shared memory begins, int32, the same in every thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem; // $1", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_shared_words(address, OFFSET: gl.constexpr, COUNT: gl.constexpr):
    """COUNT 32-bit registers (1, 2 or 4) from `address` + OFFSET, which must be a multiple of their size."""
    types: gl.constexpr = int32_registers(COUNT)
    code: gl.constexpr = _load_words(OFFSET, COUNT)
    return gl.inline_asm_elementwise(code, "=r," * COUNT + "r", [address], dtype=types, is_pure=False, pack=1)


@gluon.jit
def load_shared_float(address):
    """The float32 at `address`."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def load_shared_floats(address, COUNT: gl.constexpr):
    """COUNT (2, 4 or 8) contiguous float32 values from `address` on."""
    types: gl.constexpr = float32_registers(COUNT)
    code: gl.constexpr = _load_floats(COUNT)
    return gl.inline_asm_elementwise(code, "=&f," * COUNT + "r", [address], dtype=types, is_pure=False, pack=1)


@gluon.jit
def load_shared_as_float(address, DTYPE: gl.constexpr):
    """The value of DTYPE ("bfloat16", "float16", or "byte", unsigned) at `address`, converted to float32."""
    code: gl.constexpr = _load_as_float(DTYPE)
    return gl.inline_asm_elementwise(code, "=f,r", [address], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def load_shared_pair_as_float(address, DTYPE: gl.constexpr):
    """Two contiguous values of DTYPE ("bfloat16", "float16", or "byte", unsigned) at `address`, converted to float32."""
    types: gl.constexpr = float32_registers(2)
    code: gl.constexpr = _load_pair_as_float(DTYPE)
    return gl.inline_asm_elementwise(code, "=f,=f,r", [address], dtype=types, is_pure=False, pack=1)


@gluon.jit
def store_shared_float(address, value, mask):
    """Store a float32 where `mask` is true."""
    gl.inline_asm_elementwise(_STORE_FLOAT, "=r,r,f,r", [address, value, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_shared_word_pair(address, first, second):
    """Store two 32-bit registers at `address` and `address` + 4."""
    gl.inline_asm_elementwise(_STORE_WORD_PAIR, "=r,r,r,r", [address, first, second], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_shared_bytes(addresses, values, VECTOR: gl.constexpr):
    """Store int8 values at addresses that rise by one, VECTOR (4 or 8) neighbours of a thread per instruction.

    With VECTOR 4, pairs of lanes conflict in a bank.
    """
    code: gl.constexpr = _store_bytes(VECTOR // 4)
    constraints: gl.constexpr = "=r," * (VECTOR // 4) + "r," * (VECTOR + VECTOR // 4 - 1) + "r"
    gl.inline_asm_elementwise(code, constraints, [addresses, values], dtype=gl.int8, is_pure=False, pack=VECTOR)


@gluon.jit
def store_shared_halves(addresses, values):
    """Store 16-bit values at addresses that rise by two, eight neighbours of a thread per instruction."""
    gl.inline_asm_elementwise(_STORE_HALVES, "=r,=r,=r,=r" + ",r" * 12, [addresses, values], dtype=values.dtype, is_pure=False, pack=8)


_STORE_FLOAT = ptx(
    "{ .reg .pred p;",
    "setp.ne.b32 p, $3, 0;",  # p: the mask
    "@p st.shared.f32 [$1], $2;",
    "mov.b32 $0, $1; }",
)

_STORE_WORD_PAIR = ptx(
    "st.shared.v2.b32 [$1], {$2, $3};",
    "mov.b32 $0, $1;",
)

_STORE_HALVES = ptx(
    # $4 … $11: the eight addresses, of which the first is used; $12 … $15: eight values, two per register.
    "st.shared.v4.b32 [$4], {$12, $13, $14, $15};",
    "mov.b32 $0, $12;",
    "mov.b32 $1, $13;",
    "mov.b32 $2, $14;",
    "mov.b32 $3, $15;",
)


@triton.constexpr_function
def _load_words(offset, count):
    """PTX of `load_shared_words`."""
    results = ", ".join(f"${i}" for i in range(count))
    return f"ld.shared.v{count}.b32 {{{results}}}, [${count} + {offset}];" if count > 1 else f"ld.shared.b32 $0, [$1 + {offset}];"


@triton.constexpr_function
def _load_floats(count):
    """PTX of `load_shared_floats`."""
    lines = []
    for first in range(0, count, 4):
        results = [f"${i}" for i in range(first, min(first + 4, count))]
        lines.append(f"ld.shared.v{len(results)}.f32 {{{', '.join(results)}}}, [${count} + {4 * first}];")
    return "\n".join(lines)


@triton.constexpr_function
def _load_as_float(dtype):
    """PTX of `load_shared_as_float`."""
    if dtype == "byte":
        return ptx_text(
            "{ .reg .b16 h;",
            "ld.shared.u8 h, [$1];",  # zero-extended
            "cvt.rn.f32.u16 $0, h; }",
        )
    if dtype == "float16":
        return ptx_text(
            "{ .reg .b16 h;",
            "ld.shared.b16 h, [$1];",
            "cvt.f32.f16 $0, h; }",
        )
    return ptx_text(
        "{ .reg .b16 h, z;",
        ".reg .b32 w;",
        "mov.b16 z, 0;",
        "ld.shared.b16 h, [$1];",
        "mov.b32 w, {z, h};",  # a bfloat16 is the upper half of a float32
        "mov.b32 $0, w; }",
    )


@triton.constexpr_function
def _load_pair_as_float(dtype):
    """PTX of `load_shared_pair_as_float`."""
    if dtype == "byte":
        return ptx_text(
            "{ .reg .b16 w, l, h;",
            "ld.shared.b16 w, [$2];",
            "and.b16 l, w, 255;",
            "shr.u16 h, w, 8;",
            "cvt.rn.f32.u16 $0, l;",
            "cvt.rn.f32.u16 $1, h; }",
        )
    if dtype == "float16":
        return ptx_text(
            "{ .reg .b16 l, h;",
            "ld.shared.v2.b16 {l, h}, [$2];",
            "cvt.f32.f16 $0, l;",
            "cvt.f32.f16 $1, h; }",
        )
    return ptx_text(
        "{ .reg .b32 w, l, h;",
        "ld.shared.b32 w, [$2];",
        "shl.b32 l, w, 16;",  # a bfloat16 is the upper half of a float32
        "and.b32 h, w, 0xffff0000;",
        "mov.b32 $0, l;",
        "mov.b32 $1, h; }",
    )


@triton.constexpr_function
def _store_bytes(words):
    """PTX of `store_shared_bytes`: `words` results, the addresses of all bytes (the first is used), then the words to store."""
    values = [f"${5 * words + i}" for i in range(words)]
    vector = f".v{words}" if words > 1 else ""
    lines = [f"st.shared{vector}.b32 [${words}], {{{', '.join(values)}}};"]
    return "\n".join(lines + [f"mov.b32 ${i}, {value};" for i, value in enumerate(values)])
