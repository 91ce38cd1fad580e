"""The fused layer kernel for 1 to 8 tokens: the four linears between one layer's attention and the next one's, in one launch.

Formula, for x [tokens, k] from attention and the residual stream r [tokens, hidden] (norm: RMS norm with weights):

    h   = r + x · W_outᵀ
    a   = act(norm(h) · W_gateᵀ) × (norm(h) · W_upᵀ)
    y   = h + a · W_downᵀ
    qkv = norm(y) · W_qkvᵀ                                   (not after the last layer)

with biases where there are any. On tensor-parallel ranks, products with W_out and W_down are summed over ranks (`rank_sum`). Weights are
bfloat16, float16, fp8 (e4m3 × e4m3), int8, or int4 in groups of 32, 64 or 128; the last two are multiplied by activations of two int8
digits (`activations`).

Grid: one CTA per SM, 8 warps each, all resident at the same time (a cooperative launch). A CTA computes a contiguous range of 16-row tiles
of each linear (`schedule`) for all tokens, and every CTA quantizes all activations for itself.

Timeline of a CTA. The copies of weights run ahead of their use by NUM_STAGES stages per warp, across the ends of linears:

    copies      | out_proj      | gate_up …                    | down …             | qkv …        |
    griddepcontrol.wait |
    quantize            |q|                |q|                     |q|                 |q|
    multiply              |out_proj|         |gate_up          |     |down      |        |qkv |
    epilogue                       |e|                         |e|              |e|           |e|
    grid barrier                     |b|                         |b|              |b|

Why one launch: each linear alone ends with idle memory, while CTAs finish, the next kernel starts, activations are quantized, and only then
weights are requested.

Layouts: shared memory in `config`; a pipeline stage and its chunk permutation in `ptx.pipeline`; register fragments in `ptx.mma`.

Rows of a 16-row tile in a lane: 2i and 2i + 1 for one i (`row_pair_of`), so that scales and zeros are loaded in pairs. Features of a lane:
32 contiguous bytes of each 128, in pieces of 8 or 16 bytes.

Theoretical floor: the bytes of the four weights ÷ 4.42 TB/s (the measured read bandwidth of an H200). Llama-3.1-8B, one token, µs per layer
(benchmarks/results/h200_fused_layer_launches.json; one after another: the linears' own kernels):

    | weights                    | floor | this kernel | one after another |
    | fp8                        | 49    | 59          | 67                |
    | int4, groups of 128        | 26    | 38          | 55                |
    | int4, groups of 32         | 29    | 43          | 76                |

What is left of an AWQ layer of 42 µs, attention included: three grid barriers of 0.8 to 1.3 µs, four quantizations of 1 to 2 µs
(docs/performance.md).
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton import activation
from stoker.kernels.triton.fused_layer.linear_args import unpack_linears, unpack_numbers
from stoker.kernels.triton.fused_layer.small_batch.activations import store_activations
from stoker.kernels.triton.fused_layer.small_batch.config import (
    activation_bytes,
    columns_per_token,
    digit_distance,
    group_sum_bytes,
    has_digits,
    has_row_scales,
    make_config,
    padded_width,
    shared_bytes,
    shared_offsets,
    stage_bytes,
)
from stoker.kernels.triton.fused_layer.small_batch.products import (
    add_byte_products,
    add_group_products,
    group_products,
    load_scales,
    piece_bytes,
    repeat,
    sums_of_rows,
)
from stoker.kernels.triton.fused_layer.small_batch.rank_sum import Ranks, advance_turns, load_turn, sum_over_ranks
from stoker.kernels.triton.fused_layer.small_batch.schedule import begin_prefetch, prefetch, tiles_of_cta
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, groups_per_block, load_row_pairs, row_pair_of
from stoker.kernels.triton.ptx.shared import load_shared_float, shared_base, store_shared_float
from stoker.kernels.triton.ptx.sync import cta_barrier, grid_barrier, pdl_wait_and_launch_dependents, warp_barrier

activated = gluon.jit(activation.activated.fn)


@gluon.jit
def multiply(state, stage, linears, num_ctas, shared, lane, warp, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Multiply this CTA's tiles of linear number INDEX by the activations and store each warp's partial results in shared memory.

    Every warp multiplies its own features. `stage` is the number of the pipeline stage to use next. Returns the `SmallBatchPrefetchState`
    and the stage after the last one used.
    """
    GATED: gl.constexpr = CONFIG.gated[INDEX]
    INT4: gl.constexpr = CONFIG.format == "int4"
    BLOCKS: gl.constexpr = CONFIG.blocks_per_stage
    WARPS: gl.constexpr = CONFIG.num_warps
    TOKENS: gl.constexpr = CONFIG.num_tokens
    STAGES: gl.constexpr = CONFIG.num_stages
    STAGE_BYTES: gl.constexpr = stage_bytes(CONFIG)
    BLOCK_ACTIVATIONS: gl.constexpr = 256 if INT4 else 128  # bytes of activations that a block of weights is multiplied by
    BLOCK_GROUP_SUMS: gl.constexpr = 4 * groups_per_block(CONFIG.group_size) * BLOCKS
    LANE_TOKENS: gl.constexpr = 2 // columns_per_token(CONFIG)  # whose sums a lane has
    offsets: gl.constexpr = shared_offsets(CONFIG, INDEX)
    linear = linears[INDEX]
    _, num_tiles = tiles_of_cta(linear.n, num_ctas)
    pipeline = shared + warp * (STAGES * STAGE_BYTES)
    # B fragments: lane l loads column l / 4; one or two columns are a token's. Lanes of absent tokens load the last one.
    activations = shared + offsets[0] + lane % 4 * 16 + warp * (BLOCK_ACTIVATIONS * BLOCKS)
    activations += gl.minimum(lane // 4 // columns_per_token(CONFIG), TOKENS - 1) * activation_bytes(CONFIG, INDEX)
    if has_digits(CONFIG):
        activations += lane // 4 % 2 * digit_distance(CONFIG, INDEX)  # even columns are coarse digits, odd ones fine digits
    group_sums = shared + offsets[1] + warp * BLOCK_GROUP_SUMS + gl.minimum(lane % 4, TOKENS - 1) * group_sum_bytes(CONFIG, INDEX)
    zero = lane * 0
    for tile in range(num_tiles * (2 if GATED else 1)):
        if INT4:
            acc = repeat(zero.to(gl.float32), 2)
        elif CONFIG.format == "bytes":
            acc = repeat(zero, 8 * BLOCKS)
        else:
            acc = repeat(zero.to(gl.float32), 8 * BLOCKS)
        for step in range(gl.cdiv(linear.row_blocks, WARPS * BLOCKS)):
            stage_address = pipeline + stage * STAGE_BYTES
            words = load_row_pairs(stage_address, lane, piece_bytes(CONFIG), BLOCKS, STAGES - 1)
            of_step = activations + step * (BLOCK_ACTIVATIONS * WARPS * BLOCKS)
            # Issuing copies takes as long as the matrix instructions do: it stands where the warp would wait for their results.
            if INT4:
                scales_zeros = load_scales(stage_address + BLOCKS * BLOCK_BYTES, lane, CONFIG)
                warp_barrier(lane)  # all lanes have loaded their scales: the stage may be overwritten
                products = group_products(words, of_step, zero, CONFIG)
            else:
                acc = add_byte_products(acc, words, of_step, CONFIG)
            state = prefetch(state, linears, num_ctas, stage_address, lane, warp, CONFIG)
            if INT4:
                acc = add_group_products(acc, products, group_sums + step * (BLOCK_GROUP_SUMS * WARPS), scales_zeros, CONFIG)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        sums = sums_of_rows(acc, CONFIG)
        for row in gl.static_range(2):
            for of_lane in gl.static_range(LANE_TOKENS):
                token = lane % 4 * LANE_TOKENS + of_lane
                element = (token * WARPS + warp) * CONFIG.max_rows[INDEX] + tile * 16 + row_pair_of(lane) + row
                store_shared_float(shared + offsets[2] + element * 4, sums[LANE_TOKENS * row + of_lane], token < TOKENS)
    return state, stage


@gluon.jit
def sum_over_warps(address, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """The sum of the partial results of all warps for one row and token. `address` is the shared address of warp 0's."""
    WARPS: gl.constexpr = CONFIG.num_warps
    y = load_shared_float(address)
    for warp in gl.static_range(1, WARPS):
        y += load_shared_float(address + 4 * CONFIG.max_rows[INDEX] * warp)
    return y


@gluon.jit
def load_constants(linear, num_ctas, thread, NORMED: gl.constexpr, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """(scale, scale of the gated row, bias, bias of the gated row, norm weights): what a linear reads besides its weight and activations.

    The first four belong to this thread's output row. No kernel of a step writes them, so they are loaded while the previous linear is
    multiplied: a load that is issued while the pipeline fills waits behind the copies (1.8 µs per linear on an H200).
    """
    GATED: gl.constexpr = CONFIG.gated[INDEX]
    WIDTH: gl.constexpr = padded_width(CONFIG, INDEX)
    n = linear.n
    first, num_tiles = tiles_of_cta(n, num_ctas)
    row = first * 16 + thread
    mask = thread < num_tiles * 16
    scale = 1.0
    up_scale = 1.0
    bias = 0.0
    up_bias = 0.0
    norm_weight = 0.0
    if has_row_scales(CONFIG):
        scale = gl.load(linear.scale_ptr + row, mask=mask, other=0.0)
        if GATED:
            up_scale = gl.load(linear.scale_ptr + n + row, mask=mask, other=0.0)
    if CONFIG.has_bias[INDEX]:
        bias = gl.load(linear.bias_ptr + row, mask=mask, other=0.0)
        if GATED:
            up_bias = gl.load(linear.bias_ptr + n + row, mask=mask, other=0.0)
    if NORMED:
        cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [CONFIG.num_warps], [0]))
        norm_weight = gl.load(linear.norm_ptr + cols, mask=cols < linear.k, other=0.0)
    return scale, up_scale, bias, up_bias, norm_weight


@gluon.jit
def load_residuals(residual_ptr, n, mask, TOKENS: gl.constexpr):
    """The residual of each token at this thread's output row.

    Read through L2 (cg), because other CTAs may have stored it in this launch.
    """
    residuals = ()
    for token in gl.static_range(TOKENS):
        residuals = residuals + (gl.load(residual_ptr + token * n, mask=mask, other=0.0, cache_modifier=".cg"),)
    return residuals


@gluon.jit
def store_row(linear, y, residuals, token, row, mask, ADDS_RESIDUAL: gl.constexpr):
    """Store y, the result of one token at this thread's output row, after adding its residual if ADDS_RESIDUAL."""
    if ADDS_RESIDUAL:
        y += residuals[token].to(gl.float32)
    gl.store(linear.out_ptr + token * linear.n + row, y.to(linear.out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def run_linear(
    state,
    stage,
    constants,
    linears,
    barrier_ptr,
    num_ctas,
    shared,
    thread,
    ranks,
    INDEX: gl.constexpr,
    CONFIG: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute linear number INDEX: wait for its input, quantize it, multiply, and store this CTA's rows (one thread per row).

    Linears 0 and 2 (out_proj, down) add a residual, after the sum over `ranks` (`rank_sum.Ranks`); linears 1 and 3 (gate_up, qkv) begin
    with a norm. `constants` is the result of `load_constants` for this linear. Returns the prefetch state, the next stage, and the
    constants of the next linear.
    """
    linear = linears[INDEX]
    GATED: gl.constexpr = CONFIG.gated[INDEX]
    HAS_BIAS: gl.constexpr = CONFIG.has_bias[INDEX]
    ADDS_RESIDUAL: gl.constexpr = INDEX % 2 == 0
    SUMS_OVER_RANKS: gl.constexpr = ADDS_RESIDUAL and ranks.inboxes is not None
    ACTIVATION: gl.constexpr = CONFIG.activation
    TOKENS: gl.constexpr = CONFIG.num_tokens
    WARPS: gl.constexpr = CONFIG.num_warps
    offsets: gl.constexpr = shared_offsets(CONFIG, INDEX)
    lane = thread % 32
    warp = thread // 32
    activations = shared + offsets[0]
    group_sums = shared + offsets[1]
    partials = shared + offsets[2]
    scale, up_scale, bias, up_bias, norm_weight = constants
    if INDEX > 0:
        grid_barrier(barrier_ptr, num_ctas, gl.program_id(0) == 0, thread)
    else:
        pdl_wait_and_launch_dependents(thread, USE_PDL)
    steps = store_activations(linear, norm_weight, gl.max(activations, 0), gl.max(group_sums, 0), not ADDS_RESIDUAL, INDEX, CONFIG)
    n = linear.n
    first, num_tiles = tiles_of_cta(n, num_ctas)
    row = first * 16 + thread
    mask = thread < num_tiles * 16
    residuals = repeat(0.0, TOKENS)
    if ADDS_RESIDUAL:
        residuals = load_residuals(linear.residual_ptr + row, n, mask, TOKENS)
    if SUMS_OVER_RANKS:
        turn = load_turn(ranks, INDEX)
    if len(CONFIG.gated) > INDEX + 1:
        constants = load_constants(linears[INDEX + 1], num_ctas, thread, ADDS_RESIDUAL, INDEX + 1, CONFIG)
    cta_barrier()
    state, stage = multiply(state, stage, linears, num_ctas, shared, lane, warp, INDEX, CONFIG)
    cta_barrier()
    TILE_ROWS: gl.constexpr = 32 if GATED else 16  # partial results of a tile: 16 gates, then the 16 rows that they gate
    partial_sums = ()
    for token in gl.static_range(TOKENS):
        partial = partials + gl.where(mask, (thread // 16 * TILE_ROWS + thread % 16) * 4, 0) + token * (4 * WARPS * CONFIG.max_rows[INDEX])
        y = sum_over_warps(partial, INDEX, CONFIG) * steps[token]
        if has_row_scales(CONFIG):
            y *= scale
        if HAS_BIAS:
            y += bias.to(gl.float32)
        if GATED:
            up = sum_over_warps(partial + 64, INDEX, CONFIG) * steps[token]
            if has_row_scales(CONFIG):
                up *= up_scale
            if HAS_BIAS:
                up += up_bias.to(gl.float32)
            y = activated(y, ACTIVATION) * up
        if SUMS_OVER_RANKS:
            partial_sums = partial_sums + (y,)
        else:
            store_row(linear, y, residuals, token, row, mask, ADDS_RESIDUAL)
    if SUMS_OVER_RANKS:
        sums = sum_over_ranks(partial_sums, ranks, turn, n, num_ctas, thread, CONFIG.max_rows[INDEX], WARPS)
        if INDEX == 2:
            advance_turns(ranks, turn, num_tiles > 0)
        for token in gl.static_range(TOKENS):
            store_row(linear, sums[token], residuals, token, row, mask, ADDS_RESIDUAL)
    return state, stage, constants


@gluon.jit(do_not_specialize=["num_ctas", "rank", "max_polls"])
def fused_layer_small_batch_kernel(
    # Pointers and sizes
    linears,  # `pack_linears` of out_proj, gate_up, down and, unless this is the last layer, qkv
    barrier_ptr,  # int32 [1], see `grid_barrier`
    num_ctas,  # of the grid (num_ctas,)
    # Tensor-parallel ranks; see `rank_sum.Ranks`
    inboxes,
    own_inbox,
    turns_ptr,
    rank,
    max_polls,
    # Linears: texts of `pack_numbers`, one number per linear
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FEATURES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    # Weights; see `SmallBatchConfig`
    FORMAT: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    ZERO_KIND: gl.constexpr,
    # Pipeline and tiles
    NUM_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    BLOCKS_PER_STAGE: gl.constexpr,
    MAX_ROWS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    UNITS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One CTA of the persistent launch. GATED, HAS_BIAS and FEATURES are strings of `pack_numbers` with one number per linear."""
    config: gl.constexpr = make_config(
        GATED,
        HAS_BIAS,
        FEATURES,
        ACTIVATION,
        FORMAT,
        GROUP_SIZE,
        SCALE_DTYPE,
        ZERO_KIND,
        NUM_STAGES,
        NUM_WARPS,
        BLOCKS_PER_STAGE,
        MAX_ROWS,
        NUM_TOKENS,
    )
    COUNT: gl.constexpr = len(unpack_numbers(GATED))
    linears = unpack_linears(linears, COUNT)
    ranks = Ranks(inboxes, own_inbox, turns_ptr, rank, max_polls, UNITS)
    SHARED_BYTES: gl.constexpr = shared_bytes(config)
    STAGE_BYTES: gl.constexpr = stage_bytes(config)
    allocation = gl.allocate_shared_memory(gl.int8, [SHARED_BYTES // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, 32 * NUM_WARPS, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    lane = thread % 32
    warp = thread // 32
    shared = shared_base(thread)
    constants = load_constants(linears[0], num_ctas, thread, False, 0, config)
    state = begin_prefetch(linears, num_ctas, lane, warp, config)
    for stage in range(NUM_STAGES):
        state = prefetch(state, linears, num_ctas, shared + (warp * NUM_STAGES + stage) * STAGE_BYTES, lane, warp, config)
    next_stage = gl.to_tensor(0)
    for index in gl.static_range(COUNT):
        state, next_stage, constants = run_linear(
            state, next_stage, constants, linears, barrier_ptr, num_ctas, shared, thread, ranks, index, config, USE_PDL
        )
    allocation._keep_alive()
