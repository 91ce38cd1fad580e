"""GEMM for many rows (prefill steps) on Hopper: persistent, warp-specialized, with the operations around the product in its epilogue.

Formula, for x [m, k] and weight [n, k], or [2 × n, k] if gated, both bfloat16, float16 or float8_e4m3fn with a scale per row:

    y   = (x · weightᵀ) × x_scale[:, None] × weight_scale + bias
    out = y + residual                        or, if gated,  act(y[:, :n]) × y[:, n:] + residual          [m, n]

Grid: one CTA per SM. CTA i computes the output tiles i, i + number of CTAs … of `block_m` rows and `block_n` rows of the weight; half of
those of a gated tile are gates, the other half are the values that they multiply. Three partitions of warps run at their own speed:

    producer (1 warp)       TMA copies of BLOCK_K features of x and of the weight into a stage, up to `num_stages` ahead, across tiles
    consumer 0 (4 warps)    wgmma over the upper half of the tile's rows, accumulators in registers, then the epilogue
    consumer 1 (4 warps)    the same for the lower half

The producer loads the next tile during the epilogues, and scales and residuals are loaded into registers before the main loop.

Shared memory, for 128 × 256 tiles and rows of 128 bytes (64 features of bfloat16, 128 of e4m3), all with the 128-byte swizzle:

    stage 0        | x [128, BLOCK_K]: rows of consumer 0, of consumer 1 | weight [128, BLOCK_K] | weight [128, BLOCK_K] |   48 KiB
    ...            |                                                     | first half or gates   | second half or values |
    stage 3
    staging        | consumer 0: 2 × [64, 64] 16-bit outputs | consumer 1 |   32 KiB, the source of TMA stores
    scales         | consumer 0: those of the tile's weight rows | consumer 1 |   2 KiB
    full, empty    mbarriers of each stage: completed by the bytes of its copies; by an arrival of each consumer

The halves of an accumulator [64, 256] are a choice of registers: in the layout of wgmma, a thread has the same columns of both.

Theoretical floor: 2 × m × n × k operations (twice that if gated) ÷ 989 TFLOP/s for 16-bit operands, 1979 for FP8 (data sheet).
Reached on an H100 for linears of Llama-3.1-8B and 70B with 8192 rows: 661 to 779 TFLOP/s of bfloat16 and 1.24 to 1.47 PFLOP/s of
FP8; the library in the same series 654 to 795 and 1.27 to 1.51. The limit of such series is power: at 690 of 700 W, the clock is
1.5 to 1.6 GHz.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.gemm.large.gluon_names import async_load, async_store, reinterpret
from stoker.kernels.triton.ptx.sync import cta_barrier


@gluon.jit
def tile_origin(tile, m, n, TILE: gl.constexpr, GATED: gl.constexpr):
    """(first row, first output column) of tile number `tile`. Groups of GROUP_M tiles of rows share a weight tile in L2."""
    COLUMNS: gl.constexpr = TILE.block_n // 2 if GATED else TILE.block_n
    m_tiles = gl.cdiv(m, TILE.block_m)
    n_tiles = gl.cdiv(n, COLUMNS)
    group_size = TILE.group_m * n_tiles
    first = tile // group_size * TILE.group_m
    height = gl.minimum(m_tiles - first, TILE.group_m)
    index = tile % group_size
    return (first + index % height) * TILE.block_m, index // height * COLUMNS


@gluon.jit
def count_tiles(m, n, TILE: gl.constexpr, GATED: gl.constexpr):
    """The number of output tiles."""
    COLUMNS: gl.constexpr = TILE.block_n // 2 if GATED else TILE.block_n
    return gl.cdiv(m, TILE.block_m) * gl.cdiv(n, COLUMNS)


@gluon.jit
def produce(
    x_desc,
    weight_desc,
    x_stages,  # [STAGES, block_m, BLOCK_K]
    weight_stages,  # [2 × STAGES, block_n / 2, BLOCK_K]
    full,
    empty,
    m,
    n,
    k,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
):
    """The producer: fill stages with the operands of this CTA's tiles, as consumers free them. Zeros fill what exceeds a tensor."""
    STAGES: gl.constexpr = TILE.num_stages
    HALF: gl.constexpr = TILE.block_n // 2
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = (TILE.block_m + TILE.block_n) * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), count_tiles(m, n, TILE, GATED), gl.num_programs(0)):
        row, column = tile_origin(tile, m, n, TILE, GATED)
        second = column + n if GATED else column + HALF
        for begin in range(0, k, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            async_load(x_desc, [row, begin], full.index(stage), x_stages.index(stage))
            async_load(weight_desc, [column, begin], full.index(stage), weight_stages.index(2 * stage))
            async_load(weight_desc, [second, begin], full.index(stage), weight_stages.index(2 * stage + 1))
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def rows_of_weight(column, n, N: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows, mask) of the weight that the N columns of the accumulator of the tile at output column `column` belong to."""
    HALF: gl.constexpr = N // 2
    index = gl.arange(0, N, LAYOUT)
    if GATED:
        return column + index + (index // HALF) * (n - HALF), column + index % HALF < n
    else:
        return column + index, column + index < n


@gluon.jit
def split_columns(values):
    """The left and the right half of the columns of `values`: a choice of registers, in which nothing moves."""
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))


@gluon.jit
def store_columns(values, staging, out_desc, row, column, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Store `values` at (row, column) of the output in two parts, through the two buffers of consumer INDEX."""
    parts = split_columns(values)
    for i in gl.static_range(2):
        part = gl.convert_layout(parts[i], LAYOUT)  # the same registers
        buffer = staging.index(2 * INDEX + i)
        tma.store_wait(1)  # the last store but one, from this buffer, has read it
        cta_barrier()
        buffer.store(part.to(out_desc.dtype))
        fence_async_shared()
        cta_barrier()
        async_store(out_desc, [row, column + i * part.shape[1]], buffer)


@gluon.jit
def gated_values(gate, values, GATE: gl.constexpr):
    """act(gate) × values. silu divides approximately (2 ulp), which takes fewer instructions."""
    if GATE == "silu":
        denominator = 1.0 + gl.exp2(gate * -1.4426950408889634)
        inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=gl.float32, is_pure=True, pack=1)
        return gate * inverse * values
    else:
        return activated(gate, GATE) * values


@gluon.jit
def consume(
    out_desc,
    shared,  # x_parts, weight_stages, staging, scales, full and empty: see large_gemm_kernel
    epilogue,  # x_scale_ptr, weight_scale_ptr, bias_ptr and residual_ptr
    m,
    n,
    k,
    INDEX: gl.constexpr,  # of the consumer: 0 or 1
    TILE: gl.constexpr,
    GATE: gl.constexpr,
):
    """A consumer: multiply its ROWS rows of each of the CTA's tiles (parts 2 × stage + INDEX of x), and store the outputs."""
    x_parts, weight_stages, staging, scales, full, empty = shared
    x_scale_ptr, weight_scale_ptr, bias_ptr, residual_ptr = epilogue
    STAGES: gl.constexpr = TILE.num_stages
    ROWS: gl.constexpr = TILE.block_m // 2
    BLOCK_K: gl.constexpr = x_parts.shape[2]
    N: gl.constexpr = TILE.block_n
    HALF: gl.constexpr = N // 2
    GATED: gl.constexpr = GATE is not None
    INSTR_K: gl.constexpr = 256 // x_parts.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, INSTR_K])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF if GATED else N, INSTR_K])
    PART_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, INSTR_K])
    SCALE_LAYOUT: gl.constexpr = gl.BlockedLayout([N // 128], [32], [4], [0])
    weights = reinterpret(weight_stages, weight_stages.dtype, [STAGES, N, BLOCK_K], weight_stages.layout)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), count_tiles(m, n, TILE, GATED), gl.num_programs(0)):
        row, column = tile_origin(tile, m, n, TILE, GATED)
        row += INDEX * ROWS
        if x_scale_ptr is not None:  # loaded ahead of their use
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            x_scale = gl.load(x_scale_ptr + rows, mask=rows < m, other=0.0)
            weight_rows, inside = rows_of_weight(column, n, N, GATED, SCALE_LAYOUT)
            weight_scale = gl.load(weight_scale_ptr + weight_rows, mask=inside, other=0.0)
        if residual_ptr is not None:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT_LAYOUT))
            columns = column + gl.arange(0, HALF if GATED else N, gl.SliceLayout(0, OUT_LAYOUT))
            pointers = residual_ptr + rows[:, None].to(gl.int64) * n + columns[None, :]
            residual = gl.load(pointers, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0.0)
        acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        for begin in range(0, k, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(x_parts.index(2 * stage + INDEX), weights.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the products of the previous stage are complete: it is free
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=begin > 0)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        if x_scale_ptr is not None:
            scales.index(INDEX).store(weight_scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        if x_scale_ptr is not None:
            acc *= x_scale[:, None]
            acc *= scales.index(INDEX).load(gl.SliceLayout(0, LAYOUT))[None, :]
        if bias_ptr is not None:
            weight_rows, inside = rows_of_weight(column, n, N, GATED, gl.SliceLayout(0, LAYOUT))
            acc += gl.load(bias_ptr + weight_rows, mask=inside, other=0.0).to(gl.float32)[None, :]
        if GATED:
            gates, values = split_columns(acc)
            out = gl.convert_layout(gated_values(gates, values, GATE), OUT_LAYOUT)
        else:
            out = acc
        if residual_ptr is not None:
            out += residual.to(gl.float32)
        if GATED:
            store_columns(out, staging, out_desc, row, column, INDEX, PART_LAYOUT)
        else:
            left, right = split_columns(out)
            store_columns(left, staging, out_desc, row, column, INDEX, PART_LAYOUT)
            store_columns(right, staging, out_desc, row, column + HALF, INDEX, PART_LAYOUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m"])
def large_gemm_kernel(
    # TMA descriptors
    x_desc,  # [m, k], copies of [block_m, BLOCK_K]
    weight_desc,  # [n or 2 × n, k], copies of [block_n / 2, BLOCK_K]
    out_desc,  # [m, n], copies of [block_m / 2, block_n / 4]
    # Pointers
    x_scale_ptr,  # float32 [m] or None
    weight_scale_ptr,  # float32 [rows of the weight] or None
    bias_ptr,  # [rows of the weight] or None
    residual_ptr,  # [m, n] or None
    # Sizes
    m,
    n,
    k,
    # Constants
    TILE: gl.constexpr,  # LargeGemmTile
    GATE: gl.constexpr,  # an activation or None
):
    """One CTA: every (number of CTAs)-th output tile. See the top of this file."""
    STAGES: gl.constexpr = TILE.num_stages
    GATED: gl.constexpr = GATE is not None
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = TILE.block_m // 2
    x_stages = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TILE.block_m, BLOCK_K], x_desc.layout)
    x_parts = reinterpret(x_stages, x_desc.dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    weight_stages = gl.allocate_shared_memory(weight_desc.dtype, [2 * STAGES, TILE.block_n // 2, BLOCK_K], weight_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [4, ROWS, TILE.block_n // 4], out_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [2, TILE.block_n], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    shared = (x_parts, weight_stages, staging, scales, full, empty)
    epilogue = (x_scale_ptr, weight_scale_ptr, bias_ptr, residual_ptr)
    gl.warp_specialize(
        [
            (consume, (out_desc, shared, epilogue, m, n, k, 0, TILE, GATE)),
            (consume, (out_desc, shared, epilogue, m, n, k, 1, TILE, GATE)),
            (produce, (x_desc, weight_desc, x_stages, weight_stages, full, empty, m, n, k, TILE, GATED)),
        ],
        [4, 1],
        [240, 24],
    )
