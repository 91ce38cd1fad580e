"""Stores activations in the order in which `skinny_int4.kernel` loads B fragments, after the norm and the input gate.

    out = arranged(norm(input_gate(x)) × norm_weight)          x [m, k], or [m, 2 × k] with an input gate; out has 16 bits per feature

Grid: (tokens, blocks of CHUNK features); one CTA per token where there is an RMS norm, which needs a sum over all features.

Layout. A chunk of 64 bytes of an int4 row holds 2 × 64 features: those of the low nibbles (side 0) and of the high ones (side 1). Lane
l = 4 × g + c multiplies bytes 16c … 16c + 15 of the chunk with token g of each tile of 8 tokens, by two 16-byte loads (halves) per side:

    out [chunk, side, token tile, half, lane, 8 features]                           a half: 2 of the 4 words of a lane's 16 bytes

      features of one load, by the byte of the weight       | byte 0, 2 | byte 1, 3 | byte 4, 6 | byte 5, 7 |        + 8 in half 1
      register of the B fragment                            |    t0     |    t1     |    t2     |    t3     |

That is the order in which `dequantize_int4` returns weights. A warp reads 32 × 16 contiguous bytes per load.

Theoretical floor: one read and one write of x at the speed of memory. For the tokens of a decode step, the launch itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.activations import row_values
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def fragment_offset(feature, token, TOKEN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """The index in `out` at which `feature` of `token` is stored. See the layout in the module docstring."""
    byte = feature // (2 * GROUP) * GROUP + feature % GROUP  # of the weight row, which has groups 2i and 2i + 1 in the same bytes
    side = feature // GROUP % 2
    word, byte_of_word = byte % 16 // 4, byte % 4
    chunk_side = byte // 64 * 2 + side
    lane = token % 8 * 4 + byte % 64 // 16
    load = ((chunk_side * TOKEN_TILES + token // 8) * 2 + word // 2) * 32 + lane
    return load * 8 + word % 2 * 4 + byte_of_word % 2 * 2 + byte_of_word // 2


@triton.jit
def arrange_tokens_kernel(
    # Pointers
    x_ptr,  # [m, k]; with an input gate [m, 2 × k]: gates, then the values that they multiply
    norm_weight_ptr,  # [k] or None
    out_ptr,  # [padded_k × 8 × TOKEN_TILES]; features from k on are zeros, tokens from m on are not written
    # Sizes and strides
    k,
    padded_k,
    stride_x,
    eps,
    # Constants
    NORM: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    GATE: tl.constexpr,  # activation of the input gate, or None
    CHUNK: tl.constexpr,  # features in registers at a time
    WHOLE_ROW: tl.constexpr,  # whether CHUNK covers all features (NORM), so that they are read once
    USE_PDL: tl.constexpr,
):
    """One CTA: CHUNK features of one token, or all of them with WHOLE_ROW or NORM."""
    token = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row_ptr = x_ptr + token.to(tl.int64) * stride_x
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if WHOLE_ROW:
        cols = tl.arange(0, CHUNK)
        v, weighted = row_values(row_ptr, norm_weight_ptr, cols, k, NORM, GATE)
        if NORM:
            weighted *= tl.rsqrt(tl.sum(v * v, 0) / k + eps)
        tl.store(out_ptr + fragment_offset(cols, token, TOKEN_TILES, GROUP), weighted.to(DTYPE), mask=cols < padded_k)
    elif NORM:
        squares = tl.zeros([CHUNK], tl.float32)
        for start in range(0, k, CHUNK):
            v, weighted = row_values(row_ptr, norm_weight_ptr, start + tl.arange(0, CHUNK), k, NORM, GATE)
            squares += v * v
        factor = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        for start in range(0, padded_k, CHUNK):
            cols = start + tl.arange(0, CHUNK)
            v, weighted = row_values(row_ptr, norm_weight_ptr, cols, k, NORM, GATE)
            tl.store(out_ptr + fragment_offset(cols, token, TOKEN_TILES, GROUP), (weighted * factor).to(DTYPE), mask=cols < padded_k)
    else:
        cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        v, weighted = row_values(row_ptr, norm_weight_ptr, cols, k, NORM, GATE)
        tl.store(out_ptr + fragment_offset(cols, token, TOKEN_TILES, GROUP), weighted.to(DTYPE), mask=cols < padded_k)
