"""Hopper's warpgroup matrix instruction (`wgmma`): int4 weights from registers times bfloat16 tokens from shared memory.

Formula: acc[64 rows, TOKENS] += dequantize(weights[64 rows, 256 features]) × tokens[256 features, TOKENS], by the four warps of a
warpgroup. One instruction multiplies 64 rows × 16 features by 16 features × TOKENS; a *block* of 256 features takes 16 instructions.

B operand in shared memory: core matrices of 8 tokens × 8 features (16 bytes), 128 contiguous bytes each, without a swizzle.

    operand of a block, 512 × TOKENS bytes:
      side 0: low nibbles                                 side 1: high nibbles
      | instruction 0 | instruction 1 | … | 7 |           | instruction 8 | … | 15 |         32 × TOKENS bytes each
        | tokens 0–7      | tokens 8–15     | …                                              256 bytes each (stride offset)
          | k 0–7 | k 8–15 |                                                                 128 bytes each (leading offset)
            token 0: 8 features × 2 bytes, token 1, … token 7

A operand in registers, of warp w (rows 16w … 16w + 15) and lane l with g = l / 4, c = l % 4:

                          k = 2c, 2c + 1      k = 2c + 8, 2c + 9
    row 16w + g               a0                   a2
    row 16w + g + 8           a1                   a3

As in `mma`, which features the hardware's k are is a matter of agreement between A and B. Lane l holds 32 contiguous bytes of a row of the
block, from byte 32c on (`pipeline.load_block`): eight words, of which word t belongs to instructions t (low nibbles) and 8 + t (high
nibbles). Bytes 0 and 2 of the word become a0 or a1 (k 0–7), bytes 1 and 3 become a2 or a3 (k 8–15):

    word t of lane l:   byte 3 | byte 2 | byte 1 | byte 0        byte b of the row: features of a pair of groups (`quant_int4`):
                          k + 9    k + 1   k + 8    k             low nibble in the first group, high nibble in the second; k = 2c

`operand_offset` is the resulting place of a feature and token in the operand.

Dequantization takes two instructions per two values. Four bits in the low fraction bits of a 16-bit half *are* a bfloat16, the subnormal
q × 2^-133; four bits higher, q × 2^-129. So `and` extracts two values and one `fma.bf16x2` makes q × scale + offset of them. Results carry
a factor SUM_SCALE = 2^-16, so that the scale × 2^117 (or 2^113) does not overflow.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import float32_registers, int32_registers, ptx

SUM_SCALE = gl.constexpr(2.0**-16)  # the factor on all products
SUBNORMAL_SCALES = gl.constexpr((2.0**117, 2.0**113))  # SUM_SCALE ÷ the value of one, for low nibbles (2^-133) and high ones (2^-129)


@triton.constexpr_function
def operand_bytes(tokens):
    """The size in bytes of the B operand of one block: 256 bfloat16 features of each token. Constexpr."""
    return 512 * tokens


@triton.constexpr_function
def first_features(group_size):
    """For c = 0 … 3, the feature in the low nibble of byte 32c of a row's block, for groups of 32, 64 or 128. Constexpr."""
    return tuple(c * 32 // group_size * 2 * group_size + c * 32 % group_size for c in range(4))


@gluon.jit
def operand_offset(feature, token, TOKENS: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """The index, in elements, of a feature of a token in the B operands of all blocks."""
    in_block = feature & 255
    byte = in_block // (2 * GROUP_SIZE) * GROUP_SIZE + in_block % GROUP_SIZE  # of the row's block
    side = (feature >> 8) * 2 + (in_block // GROUP_SIZE & 1)
    core_matrix = (side * 8 + ((byte & 31) >> 2)) * (TOKENS // 4) + (token >> 3) * 2 + (byte & 1)
    return core_matrix * 64 + (token & 7) * 8 + (byte >> 5) * 2 + ((byte & 3) >> 1)


@gluon.jit
def load_token_pieces(address, are_valid, GROUP_SIZE: gl.constexpr):
    """16 registers: the 16 bytes at `address` (int64) + 2 × f for each f of `first_features`, loaded through L2 only.

    `are_valid`: four int32, 0 where a piece lies outside of the row and becomes zeros.
    """
    types: gl.constexpr = int32_registers(16)
    code: gl.constexpr = _load_token_pieces(first_features(GROUP_SIZE))
    return gl.inline_asm_elementwise(code, "=&r," * 16 + "l,r,r,r,r", (address,) + are_valid, dtype=types, is_pure=False, pack=1)


@gluon.jit
def store_core_matrix_rows(address, pieces, TOKENS: gl.constexpr):
    """Store `pieces` from `load_token_pieces`: a token's rows of the four core matrices of two neighbouring instructions.

    `address`: the shared address of the token's 16 bytes in the first of these core matrices.
    """
    code: gl.constexpr = _store_core_matrix_rows(TOKENS)
    gl.inline_asm_elementwise(code, "=r,r" + ",r" * 16, (address,) + pieces, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_shared_for_wgmma(thread):
    """Order this thread's stores to shared memory before the reads of wgmma, which belong to the async proxy. A CTA barrier must follow."""
    gl.inline_asm_elementwise(_FENCE_SHARED, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wgmma_int4_block(acc, words, scales, offsets, operand, TOKENS: gl.constexpr):
    """acc + the products of 64 rows × 256 features. All four warps of the warpgroup must call it together.

    `acc`: TOKENS / 2 float32 registers: register 4j + 2i + k is row g + 8i, token 8j + 2c + k, times SUM_SCALE. `words`: 16 registers of
    `pipeline.load_block`.

    `scales`, `offsets`: four registers each of two equal bfloat16 (`lanes.bf16_twice`): row g with low nibbles, row g with high nibbles,
    then row g + 8. A scale is multiplied by its SUBNORMAL_SCALES; an offset, the value of q = 0, by SUM_SCALE.

    `operand`: int32, the shared address of the block's B operand.
    """
    COUNT: gl.constexpr = TOKENS // 2
    types: gl.constexpr = float32_registers(COUNT)
    code: gl.constexpr = _wgmma_int4_block(TOKENS)
    constraints: gl.constexpr = "=f," * COUNT + "r" + ",r" * 24 + _tied(COUNT)
    return gl.inline_asm_elementwise(code, constraints, (operand,) + words + scales + offsets + acc, dtype=types, is_pure=False, pack=1)


_FENCE_SHARED = ptx(
    "fence.proxy.async.shared::cta;",  # this thread's generic-proxy stores → async-proxy reads after the next barrier
    "mov.b32 $0, $1;",
)


@triton.constexpr_function
def _tied(count):
    """Constraints of `count` arguments that share the registers of the results: wgmma accumulates in place."""
    return "".join(f",{i}" for i in range(count))


@triton.constexpr_function
def _load_token_pieces(features):
    """PTX of `load_token_pieces`: results $0 … $15, the address $16, four masks $17 … $20."""
    lines = ["{ .reg .pred p;", *(f"mov.b32 ${i}, 0;" for i in range(16))]
    for piece, feature in enumerate(features):
        results = ", ".join(f"${4 * piece + i}" for i in range(4))
        lines.append(f"setp.ne.b32 p, ${17 + piece}, 0;")
        lines.append(f"@p ld.global.cg.v4.b32 {{{results}}}, [$16 + {2 * feature}];")  # cg: other CTAs may have stored it in this launch
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _store_core_matrix_rows(tokens):
    """PTX of `store_core_matrix_rows`. The address is $1; piece c is $2 + 4c … $5 + 4c: features (0 1) (2 3) (4 5) (6 7) of lane c's bytes.

    Features 0 … 3 are the four bytes of one word, so of one instruction, and features 4 … 7 of the next. Features 0 and 2 belong to the
    core matrix of k 0–7, features 1 and 3 to that of k 8–15.
    """
    lines = ["{ .reg .b32 t<4>;"]
    for instruction in range(2):
        for core_matrix, selector in enumerate(("0x5410", "0x7632")):  # the lower halves of both registers, or the upper ones
            for c in range(4):
                low, high = (f"${2 + 4 * c + 2 * instruction + i}" for i in range(2))
                lines.append(f"prmt.b32 t{c}, {low}, {high}, {selector};")
            lines.append(f"st.shared.v4.b32 [$1 + {32 * tokens * instruction + 128 * core_matrix}], {{t0, t1, t2, t3}};")
    return "\n".join([*lines, "mov.b32 $0, $1; }"])


@triton.constexpr_function
def _wgmma_int4_block(tokens):
    """PTX of `wgmma_int4_block`: results $0 … $(tokens / 2 - 1), then the operand's address, 16 words, four scales, four offsets.

    The block is done in four quarters of four instructions. A quarter's 16 A registers are dequantized while the instructions of the
    quarter before still run: in two alternating sets of registers, or, from 64 tokens on, in one set, for which two would spill.

    Matrix descriptor: bits 0–13 address ÷ 16, bits 16–29 leading offset ÷ 16 (128 bytes: k 0–7 to k 8–15), bits 32–45 stride offset ÷ 16
    (256 bytes: eight tokens to the next eight), no swizzle (bits 62–63).
    """
    acc = ", ".join(f"${i}" for i in range(tokens // 2))
    count = tokens // 2
    words, scales, offsets = count + 1, count + 17, count + 21
    num_sets = 2 if tokens < 64 else 1
    lines = [
        "{ .reg .pred p;",
        ".reg .b32 t, h, d, a<16>, b<16>;",
        ".reg .b64 v, w;",
        f"mov.b32 h, {256 >> 4};",  # upper half of the descriptor: stride offset
        "setp.ne.b32 p, h, 0;",  # true: D = A × B + D
        f"shr.u32 d, ${count}, 4;",  # lower half: address,
        f"or.b32 d, d, {(128 >> 4) << 16};",  # and leading offset
        "redux.sync.min.u32 d, d, 0xffffffff;",  # equal in all lanes; puts it into a uniform register, where wgmma reads descriptors
        "mov.b64 v, {d, h};",
    ]
    for quarter in range(4):
        side, half = quarter // 2, quarter % 2  # nibbles; which four of the lane's eight words
        registers, mask = "ab"[quarter % num_sets], ("0x000f000f", "0x00f000f0")[side]
        if quarter >= num_sets:
            lines.append(f"wgmma.wait_group.sync.aligned {num_sets - 1};")  # the instructions that read this set have finished
        for word in range(4):
            for row in range(2):
                source = f"${words + 8 * half + 4 * row + word}"
                scale_offset = f"${scales + 2 * row + side}, ${offsets + 2 * row + side}"
                lines += [
                    f"and.b32 t, {source}, {mask};",  # bytes 0 and 2: two subnormal bfloat16
                    f"fma.rn.bf16x2 {registers}{4 * word + row}, t, {scale_offset};",  # a0 or a1: their values
                    f"shr.b32 t, {source}, 8;",
                    f"and.b32 t, t, {mask};",  # bytes 1 and 3
                    f"fma.rn.bf16x2 {registers}{4 * word + 2 + row}, t, {scale_offset};",  # a2 or a3
                ]
        lines.append("wgmma.fence.sync.aligned;")  # the writes of these registers precede the reads of the instructions
        for step in range(4):
            fragment = ", ".join(f"{registers}{4 * step + i}" for i in range(4))
            distance = (side * 8 + half * 4 + step) * 32 * tokens >> 4  # to this instruction's core matrices, ÷ 16
            lines.append(f"add.s64 w, v, {distance};")
            # Arguments after the descriptor: accumulate, A not negated, B not negated, B not transposed (k is contiguous).
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{acc}}}, {{{fragment}}}, w, p, 1, 1, 0;")
        lines.append("wgmma.commit_group.sync.aligned;")
    lines.append("wgmma.wait_group.sync.aligned 0;")  # acc is valid, and the operand is no longer read
    return "\n".join([*lines, "}"])
