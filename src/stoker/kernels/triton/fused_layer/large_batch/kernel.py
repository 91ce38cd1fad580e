"""The fused layer kernel for 3 to 64 tokens of bfloat16 against int4: the four linears between two attentions, in one launch.

Formula: as in `small_batch.kernel`, for x [m, k] and the residual stream [m, hidden], m <= TOKENS (a power of two from 8 to 64):

    h   = r + x · W_outᵀ
    a   = act(norm(h) · W_gateᵀ) × (norm(h) · W_upᵀ)
    y   = h + a · W_downᵀ
    qkv = norm(y) · W_qkvᵀ                                   (not after the last layer)

Grid: one CTA per SM of 16 warps (4 warpgroups), all resident at the same time (a cooperative launch). The input features of each linear
are cut into SPLIT_K slices; a CTA has one slice of all tokens in shared memory, and multiplies 64-row tiles of the weight by it
(`schedule`). It then finishes its share of the rows, whose other slices come from other CTAs (`split_k`, `epilogue`).

Timeline of a CTA. The copies of weights run ahead of their use by NUM_STAGES stages per warp, across the ends of linears:

    copies of weights   | out_proj           | gate_up …                       | down …                          | qkv …
    griddepcontrol.wait |
    operand             |store|                        |bulk copies|                    |bulk copies|
    multiply                  |out_proj|                  |gate_up           |             |down          |
    send partial sums              | | |                     | | | | | | | | |                | | | | | | |
    epilogue                           |receive, store|                      |receive, store|             |receive, store|
    grid barrier                                      |b|                                   |b|                          |b|

Layouts: shared memory in `config`; a pipeline stage and its chunk permutation in `ptx.pipeline`; the B operand (core matrices), the A
fragments and the dequantization in `ptx.wgmma`; scales and zeros in `scales`; partial sums in `split_k`.

Theoretical floor: the bytes of the four weights ÷ 4.42 TB/s (the measured read bandwidth of an H200), 25.8 µs for Llama-3.1-8B in groups
of 128. Reached, µs per layer (docs/performance.md; one after another: the linears' own kernels):

    | tokens             | 3  | 4  | 8  | 16 | 32 | 64  |
    | this kernel        | 47 | 47 | 47 | 53 | 59 | 98  |
    | one after another  | 57 | 57 | 67 | 76 | 96 | 137 |

What limits 32 tokens: 27 steps of 1.2 µs (a block of each warpgroup), where memory takes 1.02 µs, and some 5 µs between the last product
of a linear and the first of the next: partial sums (3 µs), grid barrier (1.5), operand (0.5). What limits 64: steps of 1.75 µs, and
partial sums of four slices, for which L2 takes 10 µs per layer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.config import (
    NUM_THREADS,
    NUM_WARPS,
    make_config,
    scale_scratch_bytes,
    shared_offsets,
    stage_bytes,
)
from stoker.kernels.triton.fused_layer.large_batch.epilogue import reduce_squares, store_outputs
from stoker.kernels.triton.fused_layer.large_batch.operand import issue_operand_copies, store_operand
from stoker.kernels.triton.fused_layer.large_batch.scales import load_scales
from stoker.kernels.triton.fused_layer.large_batch.schedule import (
    ALL_ROWS,
    NUM_TILES,
    RUN_LENGTH,
    begin_linear,
    prefetch,
    schedule_entry,
    slice_of_cta,
    write_schedule,
)
from stoker.kernels.triton.fused_layer.large_batch.split_k import partials_address, send_partials
from stoker.kernels.triton.fused_layer.linear_args import unpack_linears, unpack_numbers
from stoker.kernels.triton.fused_layer.small_batch.products import repeat
from stoker.kernels.triton.ptx.bulk_copy import init_mbarriers, wait_for_bulk_copy
from stoker.kernels.triton.ptx.lanes import warp_index
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, load_block
from stoker.kernels.triton.ptx.shared import load_shared_words, shared_base
from stoker.kernels.triton.ptx.sync import cta_barrier, grid_barrier, pdl_wait_and_launch_dependents
from stoker.kernels.triton.ptx.wgmma import fence_shared_for_wgmma, operand_bytes, wgmma_int4_block


@gluon.jit
def multiply(
    state,
    stage,  # number of the warp's pipeline stage to use next
    partials_ptr,
    num_ctas,
    pipeline,  # address of the warp's stages
    scale_scratch,  # address of the warp's `scale_scratch_bytes`
    operand,
    mbarriers,  # address of the first block's; of linear 0 not used
    schedule,
    thread,
    lane,
    warp,
    INDEX: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Multiply the warpgroup's run of blocks of linear number INDEX, and send the partial sums of each tile.

    Returns (prefetch state, next stage). Other arguments are addresses in shared memory and the thread's indices.
    """
    SPLIT_K: gl.constexpr = CONFIG.split_k[INDEX]
    TOKENS: gl.constexpr = CONFIG.num_tokens
    STAGES: gl.constexpr = CONFIG.num_stages
    slice_idx, _, step = slice_of_cta(SPLIT_K, num_ctas)
    entry = schedule_entry(schedule, INDEX, warp)
    _, _, blocks, begin = load_shared_words(entry, ALL_ROWS, 4)
    left, tile = load_shared_words(entry, RUN_LENGTH, 2)
    while left > 0:
        acc = repeat(lane.to(gl.float32) * 0.0, TOKENS // 2)  # [64 rows, TOKENS] of the warpgroup
        end = gl.minimum(begin + left, blocks)
        for block in range(begin, end):
            stage_address = pipeline + stage * stage_bytes(CONFIG.group_size)
            words = load_block(stage_address, lane, STAGES - 1)
            scales, offsets = load_scales(stage_address + BLOCK_BYTES, scale_scratch, lane, CONFIG)
            state = prefetch(state, schedule, stage_address, lane, warp, CONFIG)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            if INDEX > 0:
                wait_for_bulk_copy(mbarriers + 8 * block, thread)
            acc = wgmma_int4_block(acc, words, scales, offsets, lane * 0 + operand + block * operand_bytes(TOKENS), TOKENS)
        # A run that begins inside a tile has the tile's second segment.
        partials = partials_address(partials_ptr, tile, slice_idx, gl.where(begin > 0, 1, 0), SPLIT_K, TOKENS)
        send_partials(partials + thread % 128 * 16, acc, TOKENS)
        left -= end - begin
        begin = begin * 0
        tile += step
    return state, stage


@gluon.jit
def run_linear(
    state,
    stage,
    linears,
    partials_ptr,
    squares_ptr,
    barrier_ptr,
    num_ctas,
    m,
    shared,
    thread,
    lane,
    warp,
    INDEX: gl.constexpr,
    CONFIG: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute linear number INDEX: wait for its input, load the operand, multiply, and store this CTA's rows of the outputs.

    `state` and `stage` are the prefetch state and the next pipeline stage, m the number of tokens, `shared` the start of shared memory.
    Linears 0 and 2 (out_proj, down) add a residual; linears 1 and 3 (gate_up, qkv) begin with a norm. Returns (prefetch state, next stage).
    """
    linear = linears[INDEX]
    ADDS_RESIDUAL: gl.constexpr = INDEX % 2 == 0
    NEXT: gl.constexpr = INDEX + 1 if len(CONFIG.gated) > INDEX + 1 else INDEX
    SPLIT_K: gl.constexpr = CONFIG.split_k[INDEX]
    TOKENS: gl.constexpr = CONFIG.num_tokens
    GROUP_SIZE: gl.constexpr = CONFIG.group_size
    STAGES: gl.constexpr = CONFIG.num_stages
    SLICE_BLOCKS: gl.constexpr = CONFIG.max_slice_blocks
    offsets: gl.constexpr = shared_offsets(STAGES, TOKENS, SLICE_BLOCKS, GROUP_SIZE)
    operand = shared + offsets[0]
    squares = shared + offsets[1]
    mbarriers = shared + offsets[2] + (INDEX - 1) * (8 * SLICE_BLOCKS)
    schedule = shared + offsets[3]
    (num_tiles,) = load_shared_words(schedule_entry(schedule, INDEX, warp), NUM_TILES, 1)
    if INDEX == 0:
        pdl_wait_and_launch_dependents(thread, USE_PDL)
        store_operand(linear, operand, num_ctas, m, lane, warp, CONFIG.split_k[0], TOKENS, GROUP_SIZE)
        fence_shared_for_wgmma(thread)
        cta_barrier()
    else:
        grid_barrier(barrier_ptr, num_ctas, gl.program_id(0) == 0, thread)
        if num_tiles > 0:
            issue_operand_copies(linear, operand, mbarriers, num_ctas, thread, SPLIT_K, TOKENS)
    state, stage = multiply(
        state,
        stage,
        partials_ptr,
        num_ctas,
        shared + warp * (STAGES * stage_bytes(GROUP_SIZE)),
        shared + offsets[4] + warp * scale_scratch_bytes(GROUP_SIZE),
        operand,
        mbarriers,
        schedule,
        thread,
        lane,
        warp,
        INDEX,
        CONFIG,
    )
    if not ADDS_RESIDUAL:
        reduce_squares(linear, squares_ptr, squares, thread, TOKENS)
        cta_barrier()
    store_outputs(linear, linears[NEXT], partials_ptr, squares_ptr, squares, num_tiles, num_ctas, m, thread, lane, warp, INDEX, CONFIG)
    return state, stage


@gluon.jit(do_not_specialize=["num_ctas", "m"])
def fused_layer_large_batch_kernel(
    # Pointers and sizes
    linears,  # `pack_linears` of out_proj, gate_up, down and, unless this is the last layer, qkv
    partials_ptr,  # float32, zeros: [tiles × SPLIT_K, 2, 64 × NUM_TOKENS] of the linear for which this is the most; see `split_k`
    squares_ptr,  # float32 [hidden / 16, NUM_TOKENS]; see `epilogue`
    barrier_ptr,  # int32 [1], see `grid_barrier`
    num_ctas,  # of the grid (num_ctas,)
    m,  # tokens, at most NUM_TOKENS
    # Linears: texts of `pack_numbers`, one number per linear
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    ACTIVATION: gl.constexpr,
    # Weights; see `LargeBatchConfig`
    GROUP_SIZE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    ZERO_KIND: gl.constexpr,
    # Pipeline and tiles
    NUM_STAGES: gl.constexpr,
    MAX_SLICE_BLOCKS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One CTA of the persistent launch. GATED, HAS_BIAS and SPLIT_K are strings of `pack_numbers` with one number per linear."""
    config: gl.constexpr = make_config(
        GATED,
        HAS_BIAS,
        SPLIT_K,
        ACTIVATION,
        GROUP_SIZE,
        SCALE_DTYPE,
        ZERO_KIND,
        NUM_STAGES,
        MAX_SLICE_BLOCKS,
        NUM_TOKENS,
    )
    COUNT: gl.constexpr = len(unpack_numbers(GATED))
    linears = unpack_linears(linears, COUNT)
    offsets: gl.constexpr = shared_offsets(NUM_STAGES, NUM_TOKENS, MAX_SLICE_BLOCKS, GROUP_SIZE)
    STAGE_BYTES: gl.constexpr = stage_bytes(GROUP_SIZE)
    allocation = gl.allocate_shared_memory(gl.int8, [offsets[5] // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Triton declares shared memory to the assembler only where an operation of its own uses it.
    last = allocation.index(offsets[5] // 1024 - 1)
    last.store(gl.zeros([1024], gl.int8, gl.BlockedLayout([2], [32], [NUM_WARPS], [0])))
    thread = gl.arange(0, NUM_THREADS, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    lane = thread % 32
    warp = warp_index()
    shared = shared_base(gl.to_tensor(0))
    cta_barrier()
    init_mbarriers(shared + offsets[2], 3 * MAX_SLICE_BLOCKS, thread)
    schedule = shared + offsets[3]
    if warp * 32 < NUM_WARPS * (COUNT + 1):
        write_schedule(linears, num_ctas, schedule, thread, config)
    cta_barrier()
    pipeline = shared + warp * (NUM_STAGES * STAGE_BYTES)
    state = begin_linear(schedule, gl.to_tensor(0), lane, warp, config)
    for stage in range(NUM_STAGES):
        state = prefetch(state, schedule, lane * 0 + pipeline + stage * STAGE_BYTES, lane, warp, config)
    next_stage = gl.to_tensor(0)
    for index in gl.static_range(COUNT):
        state, next_stage = run_linear(
            state,
            next_stage,
            linears,
            partials_ptr,
            squares_ptr,
            barrier_ptr,
            num_ctas,
            m,
            shared,
            thread,
            lane,
            warp,
            index,
            config,
            USE_PDL,
        )
    last._keep_alive()
