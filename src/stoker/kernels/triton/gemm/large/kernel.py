"""GEMM for many rows (prefill steps) on Hopper: persistent, warp-specialized, with the operations around the product in its epilogue.

Formula, for x [m, k] and weight [n, k], or [2 × n, k] if gated, both bfloat16, float16 or float8_e4m3fn with a scale per row:

    y   = (x · weightᵀ) × x_scale[:, None] × weight_scale + bias
    out = y + residual                        or, if gated,  act(y[:, :n]) × y[:, n:] + residual          [m, n]

Grid: one CTA per SM. CTA i computes the output tiles i, i + number of CTAs … of `block_m` rows and `block_n` rows of the weight; half of
those of a gated tile are gates, the other half are the values that they multiply. With split-K, the tiles of a last round that leaves SMs
idle are divided along the features (`split_k`). Partitions of warps run at their own speed:

    producer (1 warp)       TMA copies of BLOCK_K features of x and of the weight into a stage, up to `num_stages` ahead, across tiles
    consumer 0 (4 warps)    wgmma over the first 64 of the tile's rows, accumulators in registers, then the epilogue
    consumer 1 (4 warps)    the same for the next 64; tiles of 192 rows have a third one, and those of 64 only the first

Rows of x may also be two int8 digits each, and the weight int8 (`digits`). In the grouped form, rows are sorted by expert, and each expert
has a weight (`experts`).

The producer copies the first stages of the weight before the kernel before this one has ended, which writes x or the residual, but no
weight. It loads the next unit during the epilogues, and scales and residuals are loaded into registers before the main loop. With
split-K, the residual is loaded after it, by the CTA that combines the slices: in the main loop it would take registers of the sums.

Shared memory, for 128 × 256 tiles and rows of 128 bytes (64 features of bfloat16, 128 of e4m3), all with the 128-byte swizzle:

    stage 0        | x [128, BLOCK_K]: rows of consumer 0, of consumer 1 | weight [128, BLOCK_K] | weight [128, BLOCK_K] |   48 KiB
    ...            |                                                     | first half or gates   | second half or values |
    stage 3
    staging        | consumer 0: 2 × [64, 64] 16-bit outputs | consumer 1 |   32 KiB, the source of TMA stores
    scales         | consumer 0: those of the tile's weight rows | consumer 1 |   2 KiB
    full, empty    mbarriers of each stage: completed by the bytes of its copies; by an arrival of each consumer

Theoretical floor: 2 × m × n × k operations (twice that if gated) ÷ 989 TFLOP/s for 16-bit operands, 1979 for FP8 (data sheet).
Reached on an H100 for linears of Llama-3.1-8B and 70B with 8192 rows: 661 to 779 TFLOP/s of bfloat16 and 1.24 to 1.47 PFLOP/s of
FP8; the library in the same series 654 to 795 and 1.27 to 1.51. The limit of such series is power: at 690 of 700 W, the clock is
1.5 to 1.6 GHz.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from stoker.kernels.triton.gemm.large.digits import count_digits, load_row_scale, operand_rows
from stoker.kernels.triton.gemm.large.epilogue import load_residual, narrower, rows_of_weight, store_tile
from stoker.kernels.triton.gemm.large.experts import count_row_tiles, find_expert, first_expert
from stoker.kernels.triton.gemm.large.split_k import combine_slices, count_slices, finish_slice, unit_slice
from stoker.kernels.triton.ptx.gluon_names import async_load, reinterpret
from stoker.kernels.triton.ptx.sync import pdl_wait_and_launch_dependents

EARLY_STAGES = gl.constexpr(2)  # whose weights are loaded before the wait. With all stages, x would arrive after the weights of all
CONSUMER_ROWS = gl.constexpr(64)  # of a tile, per consumer: those of an instruction


@gluon.jit
def tile_origin(tile, m, n, TILE: gl.constexpr, GATED: gl.constexpr):
    """(first row, first output column) of tile number `tile`. Groups of GROUP_M tiles of rows share a weight tile in L2.

    The last tile of rows ends with the last row, if there are as many as in a tile, and computes some rows of the tile before it again,
    with the same bits. So its CTA loads as much as others that read the same tile of the weight, and does not run ahead of them.
    """
    COLUMNS: gl.constexpr = TILE.block_n // 2 if GATED else TILE.block_n
    m_tiles = gl.cdiv(m, TILE.block_m)
    n_tiles = gl.cdiv(n, COLUMNS)
    group_size = TILE.group_m * n_tiles
    first = tile // group_size * TILE.group_m
    height = gl.minimum(m_tiles - first, TILE.group_m)
    index = tile % group_size
    row = gl.minimum((first + index % height) * TILE.block_m, gl.maximum(m - TILE.block_m, 0))
    return row, index // height * COLUMNS


@gluon.jit
def count_column_tiles(n, TILE: gl.constexpr, GATED: gl.constexpr):
    """The number of tiles of n output columns."""
    COLUMNS: gl.constexpr = TILE.block_n // 2 if GATED else TILE.block_n
    return gl.cdiv(n, COLUMNS)


@gluon.jit
def count_units(m, n, split, offsets_ptr, TILE: gl.constexpr, GATED: gl.constexpr, EXPERTS: gl.constexpr):
    """The number of work units: all output tiles of m rows of the operand, or slices of the last of them."""
    tiles = count_row_tiles(m, offsets_ptr, TILE, EXPERTS) * count_column_tiles(n, TILE, GATED)
    return tiles if TILE.max_slices == 1 else count_slices(tiles, split)


@gluon.jit
def find_unit(
    unit,
    expert_rows,  # of an expert that is not after that of the unit, as `first_expert` returns them
    m,
    n,
    k,
    split,
    offsets_ptr,
    BLOCK_K: gl.constexpr,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The operands and the output of work unit number `unit`.

    Returns (`expert_rows` of its expert, first row of the expert's weight, first row of x, first output column, (tile, slice), first
    feature, end of the features).
    """
    tile, part, first, end = unit_slice(unit, k, split, BLOCK_K, TILE.max_slices)
    expert, first_tile, first_row, end_row = expert_rows
    expert, first_tile, first_row, end_row = find_expert(
        tile, expert, first_tile, first_row, end_row, count_column_tiles(n, TILE, GATED), offsets_ptr, TILE, EXPERTS
    )
    row, column = tile_origin(tile - first_tile, end_row - first_row, n, TILE, GATED)
    weight_row = expert * (2 * n if GATED else n)
    return (expert, first_tile, first_row, end_row), weight_row, row + first_row, column, (tile, part), first, end


@gluon.jit
def produce(
    operands,  # x_desc, weight_desc, x_stages, weight_stages, full and empty: see large_gemm_kernel
    offsets_ptr,
    m,
    n,
    k,
    split,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
    EXPERTS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """The producer: fill stages with the operands of this CTA's units, as consumers free them. Zeros fill what exceeds a tensor."""
    x_desc, weight_desc, x_stages, weight_stages, full, empty = operands
    STAGES: gl.constexpr = TILE.num_stages
    HALF: gl.constexpr = TILE.block_n // 2
    COPIES: gl.constexpr = TILE.block_m // x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = (TILE.block_m + TILE.block_n) * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8
    m = operand_rows(m, count_digits(x_desc.dtype))
    early = 0  # blocks of the weight of the first unit that are loaded before the wait
    if EXPERTS == 0:
        _, _, _, column, _, first, end = find_unit(
            gl.program_id(0), first_expert(m, offsets_ptr, EXPERTS), m, n, k, split, offsets_ptr, BLOCK_K, TILE, GATED, EXPERTS
        )
        early = gl.minimum(gl.cdiv(end - first, BLOCK_K), EARLY_STAGES)
        second = column + n if GATED else column + HALF
        for stage in range(early):
            load_weight(weight_desc, weight_stages, full, stage, column, second, first + stage * BLOCK_K, BYTES)
    pdl_wait_and_launch_dependents(gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])), USE_PDL)
    expert_rows = first_expert(m, offsets_ptr, EXPERTS)
    stage = 0
    phase = 1
    for unit in range(gl.program_id(0), count_units(m, n, split, offsets_ptr, TILE, GATED, EXPERTS), gl.num_programs(0)):
        expert_rows, weight_row, row, column, _, first, end = find_unit(
            unit, expert_rows, m, n, k, split, offsets_ptr, BLOCK_K, TILE, GATED, EXPERTS
        )
        column += weight_row
        second = column + n if GATED else column + HALF
        for begin in range(first, end, BLOCK_K):
            if early > 0:
                early -= 1
            else:
                mbarrier.wait(empty.index(stage), phase)
                load_weight(weight_desc, weight_stages, full, stage, column, second, begin, BYTES)
            for i in gl.static_range(COPIES):
                async_load(x_desc, [row + i * x_desc.block_shape[0], begin], full.index(stage), x_stages.index(COPIES * stage + i))
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def load_weight(weight_desc, weight_stages, full, stage, column, second, begin, BYTES: gl.constexpr):
    """Start the copies of both halves of a weight tile, and expect the BYTES of all copies of the stage."""
    mbarrier.expect(full.index(stage), BYTES)
    async_load(weight_desc, [column, begin], full.index(stage), weight_stages.index(2 * stage))
    async_load(weight_desc, [second, begin], full.index(stage), weight_stages.index(2 * stage + 1))


@gluon.jit
def consume(
    out_desc,
    shared,  # x_parts, weight_stages, staging, scales, full and empty: see large_gemm_kernel
    epilogue,  # x_scale_ptr, weight_scale_ptr, bias_ptr and residual_ptr
    scratch,  # partial_ptr and finished_ptr
    experts,  # offsets_ptr and out_ptr
    m,
    n,
    k,
    split,
    INDEX: gl.constexpr,  # of the consumer
    TILE: gl.constexpr,
    GATE: gl.constexpr,
    EXPERTS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A consumer: multiply its ROWS rows of each of the CTA's units (part INDEX of the rows of a stage), and store the outputs."""
    x_parts, weight_stages, staging, scales, full, empty = shared
    x_scale_ptr, weight_scale_ptr, _, residual_ptr = epilogue
    offsets_ptr, out_ptr = experts
    STAGES: gl.constexpr = TILE.num_stages
    ROWS: gl.constexpr = x_parts.shape[1]
    CONSUMERS: gl.constexpr = TILE.block_m // ROWS
    BLOCK_K: gl.constexpr = x_parts.shape[2]
    N: gl.constexpr = TILE.block_n
    GATED: gl.constexpr = GATE is not None
    DIGITS: gl.constexpr = count_digits(x_parts.dtype)
    SUM_DTYPE: gl.constexpr = gl.float32 if DIGITS == 1 else gl.int32
    INSTR_K: gl.constexpr = 256 // x_parts.dtype.primitive_bitwidth
    INSTR_N: gl.constexpr = N if DIGITS == 1 else min(N, 128)  # Triton has integer instructions of at most 224 columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, INSTR_N, INSTR_K])
    COLUMNS: gl.constexpr = N // 2 if GATED else N
    OUT_LAYOUT: gl.constexpr = narrower(LAYOUT, COLUMNS)
    SCALE_LAYOUT: gl.constexpr = gl.BlockedLayout([N // 128], [32], [4], [0])
    weights = reinterpret(weight_stages, weight_stages.dtype, [STAGES, N, BLOCK_K], weight_stages.layout)
    pdl_wait_and_launch_dependents(gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), USE_PDL)
    x_rows = operand_rows(m, DIGITS)
    expert_rows = first_expert(x_rows, offsets_ptr, EXPERTS)
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), count_units(x_rows, n, split, offsets_ptr, TILE, GATED, EXPERTS), gl.num_programs(0)):
        expert_rows, weight_row, row, column, slice_of, first, end = find_unit(
            unit, expert_rows, x_rows, n, k, split, offsets_ptr, BLOCK_K, TILE, GATED, EXPERTS
        )
        row += INDEX * ROWS
        x_scale = None
        if x_scale_ptr is not None:  # loaded ahead of their use
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            x_scale = load_row_scale(x_scale_ptr, rows, m, DIGITS)
            weight_rows, inside = rows_of_weight(column, n, N, GATED, SCALE_LAYOUT)
            weight_scale = gl.load(weight_scale_ptr + weight_row + weight_rows, mask=inside, other=0.0)
        residual = None
        if residual_ptr is not None and TILE.max_slices == 1:
            residual = load_residual(residual_ptr, row, column, m, n, ROWS, COLUMNS, OUT_LAYOUT)
        acc = gl.zeros([ROWS, N], SUM_DTYPE, LAYOUT)
        for begin in range(first, end, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(x_parts.index(CONSUMERS * stage + INDEX), weights.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the products of the previous stage are complete: it is free
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=begin > first)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        if x_scale_ptr is not None:
            scales.index(INDEX).store(weight_scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        if TILE.max_slices == 1:
            target = (out_desc, out_ptr, row // DIGITS, expert_rows[3], column, n)
            store_tile(acc, target, staging, scales, epilogue, x_scale, residual, weight_row, INDEX, GATE, DIGITS)
        else:
            is_whole = slice_of[0] < split[0]
            is_complete = is_whole
            if not is_whole:
                is_complete = finish_slice(acc, scratch, slice_of, split, INDEX, CONSUMERS)
            if is_complete:
                if not is_whole:
                    acc = combine_slices(acc, scratch, slice_of, split, INDEX, CONSUMERS)
                summand = None
                if residual_ptr is not None:
                    summand = load_residual(residual_ptr, row, column, m, n, ROWS, COLUMNS, OUT_LAYOUT)
                target = (out_desc, out_ptr, row, expert_rows[3], column, n)
                store_tile(acc, target, staging, scales, epilogue, x_scale, summand, weight_row, INDEX, GATE, DIGITS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "whole", "slices"])
def large_gemm_kernel(
    # TMA descriptors
    x_desc,  # [m, k], or [operand_rows(m), k], copies of [block_m, BLOCK_K]
    weight_desc,  # [n or 2 × n, k], of each expert if there are EXPERTS, copies of [block_n / 2, BLOCK_K]
    out_desc,  # [m, n], copies of [block_m / 2 (of digits, block_m / 4), block_n / 4]
    # Pointers
    x_scale_ptr,  # float32 [m] or None
    weight_scale_ptr,  # float32 [rows of the weight] or None
    bias_ptr,  # [rows of the weight] or None
    residual_ptr,  # [m, n] or None
    partial_ptr,  # float32, the sums of each slice, or None without split-K
    finished_ptr,  # int32, the counters of finished slices, zero between launches, or None without split-K
    offsets_ptr,  # int32 [EXPERTS + 1], the first row of each expert, or None
    out_ptr,  # that of out_desc, with EXPERTS, or None
    # Sizes
    m,
    n,
    k,
    whole,  # the number of tiles that are not divided, with split-K
    slices,  # of each later tile
    # Constants
    TILE: gl.constexpr,  # LargeGemmTile
    GATE: gl.constexpr,  # an activation or None
    EXPERTS: gl.constexpr,  # their number, or 0
    USE_PDL: gl.constexpr,
):
    """One CTA: every (number of CTAs)-th work unit. See the top of this file."""
    STAGES: gl.constexpr = TILE.num_stages
    GATED: gl.constexpr = GATE is not None
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    CONSUMERS: gl.constexpr = TILE.block_m // CONSUMER_ROWS
    COPIES: gl.constexpr = TILE.block_m // x_desc.block_shape[0]
    x_stages = gl.allocate_shared_memory(x_desc.dtype, [COPIES * STAGES, x_desc.block_shape[0], BLOCK_K], x_desc.layout)  # by copies
    x_parts = reinterpret(x_stages, x_desc.dtype, [CONSUMERS * STAGES, CONSUMER_ROWS, BLOCK_K], x_desc.layout)
    weight_stages = gl.allocate_shared_memory(weight_desc.dtype, [2 * STAGES, TILE.block_n // 2, BLOCK_K], weight_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS, out_desc.block_shape[0], TILE.block_n // 4], out_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [CONSUMERS, TILE.block_n], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    operands = (x_desc, weight_desc, x_stages, weight_stages, full, empty)
    shared = (x_parts, weight_stages, staging, scales, full, empty)
    epilogue = (x_scale_ptr, weight_scale_ptr, bias_ptr, residual_ptr)
    scratch = (partial_ptr, finished_ptr)
    experts = (offsets_ptr, out_ptr)
    split = (whole, slices)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 0, TILE, GATE, EXPERTS, USE_PDL)),
                (produce, (operands, offsets_ptr, m, n, k, split, TILE, GATED, EXPERTS, USE_PDL)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 0, TILE, GATE, EXPERTS, USE_PDL)),
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 1, TILE, GATE, EXPERTS, USE_PDL)),
                (produce, (operands, offsets_ptr, m, n, k, split, TILE, GATED, EXPERTS, USE_PDL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 0, TILE, GATE, EXPERTS, USE_PDL)),
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 1, TILE, GATE, EXPERTS, USE_PDL)),
                (consume, (out_desc, shared, epilogue, scratch, experts, m, n, k, split, 2, TILE, GATE, EXPERTS, USE_PDL)),
                (produce, (operands, offsets_ptr, m, n, k, split, TILE, GATED, EXPERTS, USE_PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
