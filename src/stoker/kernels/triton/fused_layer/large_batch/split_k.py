"""Combining split-K partial sums between CTAs with flags inside the data.

The CTAs that have the slices of a tile's features send their sums through global memory to the CTA that finishes the rows (`epilogue`). No
separate flag exists: a float32 is stored with its lowest bit set (an error of 1 in 2^23), so a word that is not zero has arrived. Its one
reader stores zero again, and so leaves the buffer ready for the next linear and the next launch.

    partials [tile, slice, segment, group of 8 tokens, thread of the warpgroup, 4]:

      tile 0:  | slice 0: segment 0 | segment 1 | slice 1: segment 0 | segment 1 | …          256 × TOKENS bytes per segment
      segment: | tokens 0–7: thread 0: c0 c1 c2 c3 | thread 1 | … | thread 127 | tokens 8–15: …
      c0 … c3: the accumulator registers of a warpgroup's thread (`ptx.wgmma`): row g token 2c, 2c + 1; row g + 8 token 2c, 2c + 1

    sender     acc | 1 → st.relaxed          …                                      one 16-byte store per 8 tokens
    reader     ld.relaxed … until no word is zero → sum over slices and segments in a fixed order → st.relaxed 0

A grid barrier instead (stores, a fence, an atomic, a load that waits) takes 1.3 µs of a linear's 10 to 20 (8B shapes, 32 tokens, H200).
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.schedule import blocks_of_slice, run_length
from stoker.kernels.triton.ptx.registers import float32_registers

LOADS_IN_FLIGHT = gl.constexpr(16)  # 16-byte loads that a lane waits for together


@triton.constexpr_function
def columns_at_once(split_k, tokens):
    """The number of groups of 8 tokens that a lane sums at once. Their segments use at most half of LOADS_IN_FLIGHT. Constexpr."""
    return max(1, min(tokens // 8, LOADS_IN_FLIGHT.value // 4 // split_k))


@gluon.jit
def partials_address(partials_ptr, tile, slice_idx, segment, SPLIT_K: gl.constexpr, TOKENS: gl.constexpr):
    """int64: the address of the partial sums of one tile, slice and segment."""
    return partials_ptr.to(gl.int64) + ((tile * SPLIT_K + slice_idx) * 2 + segment).to(gl.int64) * (256 * TOKENS)


@gluon.jit
def send_partials(address, acc, TOKENS: gl.constexpr):
    """Store a lane's accumulators `acc` (TOKENS / 2 float32 registers) at `address` (int64), 16 bytes for each 8 tokens."""
    COUNT: gl.constexpr = TOKENS // 2
    code: gl.constexpr = _send_partials(COUNT)
    gl.inline_asm_elementwise(code, "=r,l" + ",r" * COUNT, (address,) + acc, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def receive_partials(linear, address, nth, num_tiles, thread, SPLIT_K: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr):
    """The sums of a tile over all features: four float32 registers of a lane for each of COLUMNS groups of 8 tokens. Waits for the senders.

    `address` (int64) is that of the lane's first partial sums; `nth` is the index of the tile among the CTA's `num_tiles` tiles.
    """
    _, last_blocks = blocks_of_slice(linear.row_blocks, SPLIT_K - 1, SPLIT_K)  # the last slice may be shorter
    two_segments = thread * 0 + has_two_segments(nth, num_tiles, gl.cdiv(linear.row_blocks, SPLIT_K))
    last_two_segments = thread * 0 + has_two_segments(nth, num_tiles, last_blocks)
    types: gl.constexpr = float32_registers(4 * COLUMNS)
    code: gl.constexpr = _receive_partials(SPLIT_K, COLUMNS, 256 * TOKENS)
    constraints: gl.constexpr = "=&f," * (4 * COLUMNS) + "l,r,r"
    return gl.inline_asm_elementwise(code, constraints, [address, two_segments, last_two_segments], dtype=types, is_pure=False, pack=1)


@gluon.jit
def has_two_segments(nth, num_tiles, blocks):
    """1 if two warpgroups have blocks of the CTA's tile number `nth`, else 0. `blocks` is the number of blocks of a tile."""
    length = run_length(num_tiles, blocks)
    return gl.where(nth * blocks % length + blocks > length, 1, 0)


@triton.constexpr_function
def _send_partials(count):
    """PTX of `send_partials` for `count` sums. Operand $1 is the address, the sums follow. Constexpr."""
    lines = ["{ .reg .b32 t<4>;"]
    for first in range(0, count, 4):
        lines += [f"or.b32 t{i}, ${2 + first + i}, 1;" for i in range(4)]  # not zero: it has arrived
        # relaxed: each word carries its own flag, so no other store has to be ordered with it. 8 tokens take 128 threads × 16 bytes.
        lines.append(f"st.relaxed.gpu.global.v4.b32 [$1 + {512 * first}], {{t0, t1, t2, t3}};")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _receive_partials(split_k, columns, segment_bytes):
    """PTX of `receive_partials`. Operands after the results: address, whether a tile has two segments, the same for the last slice.

    Up to LOADS_IN_FLIGHT loads are issued together and repeated until all have arrived: waiting for one after another would take a memory
    latency each. The sums are then added in the order slice, segment. Constexpr.
    """
    count = 4 * columns
    address, two_segments, last_two_segments = (f"${count + i}" for i in range(3))
    lines = [
        "{ .reg .pred p, q, r;",
        ".reg .f32 f;",
        f".reg .b32 t, z, w<{4 * LOADS_IN_FLIGHT.value}>;",
        "mov.b32 z, 0;",
        *(f"mov.f32 ${i}, 0f00000000;" for i in range(count)),
        f"setp.ne.b32 p, {two_segments}, 0;",
        f"setp.ne.b32 q, {last_two_segments}, 0;",
    ]
    parts = [(slice_idx, segment, column) for slice_idx in range(split_k) for segment in range(2) for column in range(columns)]
    for begin in range(0, len(parts), LOADS_IN_FLIGHT.value):
        loads, checks, adds = [], [], []
        for at, part in enumerate(parts[begin : begin + LOADS_IN_FLIGHT.value]):
            slice_idx, segment, column = part
            predicate = "" if segment == 0 else "@q " if slice_idx == split_k - 1 else "@p "  # a second segment may not exist
            words = [f"w{4 * at + i}" for i in range(4)]
            source = f"[{address} + {(2 * slice_idx + segment) * segment_bytes + 2048 * column}]"
            lines += [f"mov.b32 {word}, 1;" for word in words]  # what is not loaded counts as arrived
            loads.append(f"{predicate}ld.relaxed.gpu.global.v4.b32 {{{', '.join(words)}}}, {source};")
            checks += [f"min.u32 t, t, {word};" for word in words]  # zero if any word has not arrived
            for i in range(4):
                adds += [f"mov.b32 f, {words[i]};", f"{predicate}add.f32 ${4 * column + i}, ${4 * column + i}, f;"]
            adds.append(f"{predicate}st.relaxed.gpu.global.v4.b32 {source}, {{z, z, z, z}};")  # ready for the next sender
        lines += [f"WAIT{begin}: mov.b32 t, 1;", *loads, *checks, "setp.eq.b32 r, t, 0;", f"@r bra WAIT{begin};", *adds]
    return "\n".join([*lines, "}"])
