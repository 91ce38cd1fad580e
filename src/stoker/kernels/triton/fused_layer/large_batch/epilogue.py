"""From partial sums to outputs: split-K reduction, norm factor, bias, activation, residual, and the next linear's operand.

The norm of gate_up and qkv is split in two, since it follows a linear whose rows lie in many CTAs. The epilogue of out_proj and down
multiplies its outputs by the norm's *weights* before it writes them as the next operand, and stores the sum of their squares for every 16
rows. The next linear's products are then multiplied by the token's *factor*, rsqrt(sum of squares / k + eps): it comes out of the sum over
features.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.config import NUM_THREADS, NUM_WARPGROUPS, TILE_ROWS
from stoker.kernels.triton.fused_layer.large_batch.schedule import slice_of_cta
from stoker.kernels.triton.fused_layer.large_batch.split_k import columns_at_once, partials_address, receive_partials
from stoker.kernels.triton.fused_layer.small_batch.kernel import activated
from stoker.kernels.triton.ptx.lanes import sum_over_fragment_rows
from stoker.kernels.triton.ptx.shared import load_shared_float, store_shared_float
from stoker.kernels.triton.ptx.wgmma import SUM_SCALE, operand_offset

SQUARES_IN_FLIGHT = gl.constexpr(16)  # loads of a thread


@gluon.jit
def reduce_squares(linear, squares_ptr, squares, thread, TOKENS: gl.constexpr):
    """Sum squares_ptr float32 [k / 16, TOKENS] to one partial sum per thread, stored at shared address `squares`.

    Thread i sums entries of token i % TOKENS; `norm_factor` adds the threads' sums.
    """
    count = linear.k // 16
    total = thread.to(gl.float32) * 0.0
    for first in range(0, count, SQUARES_IN_FLIGHT * (NUM_THREADS // TOKENS)):
        for i in gl.static_range(SQUARES_IN_FLIGHT):
            entry = first + i * (NUM_THREADS // TOKENS) + thread // TOKENS
            total += gl.load(squares_ptr + entry * TOKENS + thread % TOKENS, mask=entry < count, other=0.0, cache_modifier=".cg")
    store_shared_float(squares + 4 * thread, total, thread >= 0)


@gluon.jit
def norm_factor(linear, squares, token, TOKENS: gl.constexpr):
    """rsqrt(mean of squares + eps) of one token, from the partial sums that `reduce_squares` stored in shared memory."""
    total = load_shared_float(squares + 4 * token)
    for i in gl.static_range(1, NUM_THREADS // TOKENS):
        total += load_shared_float(squares + 4 * (i * TOKENS + token))
    return gl.rsqrt(total / linear.k + linear.norm_eps)


@gluon.jit
def store_outputs(
    linear,
    next_linear,  # the linear after it, or again this one
    partials_ptr,
    squares_ptr,
    squares,  # address of what `reduce_squares` stored
    num_tiles,  # of this CTA
    num_ctas,
    m,
    thread,
    lane,
    warp,
    INDEX: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Receive the partial sums of this CTA's units of work, and store the finished outputs of linear number INDEX.

    A unit is a tile × 8 × COLUMNS tokens. The units of the tiles that several CTAs share are distributed over these CTAs first, then over
    warpgroups, because one SM receives partial sums at only 32 KB per µs. A lane has rows g and g + 8 of its warp's 16 (of a gated linear,
    gate g and the row that it gates), and two tokens of each 8.
    """
    GATED: gl.constexpr = CONFIG.gated[INDEX]
    HAS_BIAS: gl.constexpr = CONFIG.has_bias[INDEX]
    SPLIT_K: gl.constexpr = CONFIG.split_k[INDEX]
    TOKENS: gl.constexpr = CONFIG.num_tokens
    ADDS_RESIDUAL: gl.constexpr = INDEX % 2 == 0
    ACTIVATION: gl.constexpr = CONFIG.activation
    HAS_NEXT: gl.constexpr = len(CONFIG.gated) > INDEX + 1
    COLUMNS: gl.constexpr = columns_at_once(SPLIT_K, TOKENS)
    UNITS: gl.constexpr = TOKENS // 8 // COLUMNS  # per tile
    TILE_OUTPUTS: gl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    OUTPUTS: gl.constexpr = 1 if GATED else 2  # rows of a lane that are outputs
    slice_idx, index, step = slice_of_cta(SPLIT_K, num_ctas)
    n = linear.n
    for unit in range(slice_idx + warp // 4 * SPLIT_K, num_tiles * UNITS, SPLIT_K * NUM_WARPGROUPS):
        tile = index + unit // UNITS * step
        row = tile * TILE_OUTPUTS + warp % 4 * (8 * OUTPUTS) + lane // 4
        first = unit % UNITS * (8 * COLUMNS) + lane % 4 * 2
        # All loads before all stores: a load behind a store to memory that may alias would wait for it.
        residuals = ()
        factors = ()
        for nth in gl.static_range(2 * COLUMNS):
            token = first + (nth // 2 * 8 + nth % 2)
            if ADDS_RESIDUAL:
                factors = factors + (1.0 / SUM_SCALE,)
            else:
                factors = factors + (norm_factor(linear, squares, token, TOKENS) * (1.0 / SUM_SCALE),)
            for half in gl.static_range(OUTPUTS):
                if ADDS_RESIDUAL:
                    address = linear.residual_ptr + token * n + row + 8 * half
                    residuals = residuals + (gl.load(address, mask=token < m, other=0.0, cache_modifier=".cg").to(gl.float32),)
        biases = ()
        norm_weights = ()
        for half in gl.static_range(2):
            if HAS_BIAS:
                biases = biases + (gl.load(linear.bias_ptr + row + half * (n if GATED else 8)).to(gl.float32),)
            if HAS_NEXT and ADDS_RESIDUAL:
                norm_weights = norm_weights + (gl.load(next_linear.norm_ptr + row + 8 * half).to(gl.float32),)
        partials = partials_address(partials_ptr, tile, 0, 0, SPLIT_K, TOKENS) + (unit % UNITS * (2048 * COLUMNS) + thread % 128 * 16)
        sums = receive_partials(linear, partials, unit // UNITS, num_tiles, thread, SPLIT_K, COLUMNS, TOKENS)
        for nth in gl.static_range(2 * COLUMNS):
            token = first + (nth // 2 * 8 + nth % 2)
            sum_of_squares = thread.to(gl.float32) * 0.0
            for half in gl.static_range(OUTPUTS):
                y = sums[nth // 2 * 4 + 2 * half + nth % 2] * factors[nth]
                if HAS_BIAS:
                    y += biases[half]
                if GATED:
                    up = sums[nth // 2 * 4 + 2 + nth % 2] * factors[nth]
                    if HAS_BIAS:
                        up += biases[1]
                    y = activated(y, ACTIVATION) * up
                if ADDS_RESIDUAL:
                    y += residuals[OUTPUTS * nth + half]
                rounded = y.to(gl.bfloat16)
                if not GATED:
                    gl.store(linear.out_ptr + token * n + row + 8 * half, rounded, mask=token < m)
                if HAS_NEXT and ADDS_RESIDUAL:
                    y = rounded.to(gl.float32)
                    sum_of_squares += y * y
                    rounded = (y * norm_weights[half]).to(gl.bfloat16)
                if HAS_NEXT:
                    gl.store(next_linear.x_ptr + operand_offset(row + 8 * half, token, TOKENS, CONFIG.group_size), rounded)
            if HAS_NEXT and ADDS_RESIDUAL:
                of_16_rows = squares_ptr + (tile * 4 + warp % 4) * TOKENS + token
                gl.store(of_16_rows, sum_over_fragment_rows(sum_of_squares), mask=lane < 4)
