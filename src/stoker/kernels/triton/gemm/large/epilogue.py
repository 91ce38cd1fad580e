"""What follows the product of a tile in the GEMM for many rows: scales, bias, gate and residual, and the stores.

The halves of an accumulator [64, 256] are a choice of registers: in the layout of wgmma, a thread has the same columns of both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.gemm.large.digits import combine_digits
from stoker.kernels.triton.ptx.gluon_names import async_store
from stoker.kernels.triton.ptx.sync import cta_barrier


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
def store_columns(values, target, staging, SHIFT: gl.constexpr, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Store `values` SHIFT columns after the start of `target` (see `store_tile`) in two parts, in LAYOUT if given.

    They pass through the two buffers of consumer INDEX. Those of a tile in which an expert's rows end are stored from registers.
    """
    out_desc, out_ptr, row, end_row, column, n = target
    parts = split_columns(values)
    for i in gl.static_range(2):
        part = parts[i]
        if LAYOUT is not None:
            part = gl.convert_layout(part, LAYOUT)  # the same registers
        begin = column + SHIFT + i * part.shape[1]
        if out_ptr is None or row + part.shape[0] <= end_row:
            copy_part(part, staging.index(2 * INDEX + i), out_desc, row, begin)
        else:
            rows = row + gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
            columns = begin + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
            pointers = out_ptr + rows[:, None].to(gl.int64) * n + columns[None, :]
            gl.store(pointers, part.to(out_desc.dtype), mask=(rows < end_row)[:, None] & (columns < n)[None, :])


@gluon.jit
def copy_part(part, buffer, out_desc, row, column):
    """Store `part` at (row, column) of the output by TMA, through `buffer`."""
    tma.store_wait(1)  # the last store but one, from this buffer, has read it
    cta_barrier()
    buffer.store(part.to(out_desc.dtype))
    fence_async_shared()
    cta_barrier()
    async_store(out_desc, [row, column], buffer)


@gluon.jit
def gated_values(gate, values, GATE: gl.constexpr):
    """act(gate) × values. silu divides approximately (2 ulp), which takes fewer instructions."""
    if GATE == "silu":
        denominator = 1.0 + gl.exp2(gate * -1.4426950408889634)
        inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=gl.float32, is_pure=True, pack=1)
        return gate * inverse * values
    else:
        return activated(gate, GATE) * values


@gluon.constexpr_function
def narrower(layout, columns):
    """The layout of `columns` columns of an accumulator with `layout`, in the same registers."""
    return gl.NVMMADistributedLayout(layout.version, layout.warps_per_cta, [16, columns, layout.instr_shape[2]])


@gluon.jit
def load_residual(residual_ptr, row, column, m, n, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The residuals [ROWS, COLUMNS] of the outputs at (row, column)."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    pointers = residual_ptr + rows[:, None].to(gl.int64) * n + columns[None, :]
    return gl.load(pointers, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0.0)


@gluon.jit
def store_tile(
    acc,  # [ROWS, N]: the sums of a consumer's rows of a tile
    target,  # out_desc, out_ptr or None, row, end of the expert's rows (read with out_ptr only), column, n
    staging,
    scales,
    epilogue,  # x_scale_ptr, weight_scale_ptr, bias_ptr and residual_ptr
    x_scale,
    residual,
    first_weight_row,  # of the expert
    INDEX: gl.constexpr,
    GATE: gl.constexpr,
    DIGITS: gl.constexpr,
):
    """Apply scales, bias, gate and residual to the sums of a consumer's rows of a tile, and store the outputs."""
    x_scale_ptr, _, bias_ptr, residual_ptr = epilogue
    _, _, _, _, column, n = target
    N: gl.constexpr = acc.shape[1]
    HALF: gl.constexpr = N // 2
    GATED: gl.constexpr = GATE is not None
    SUM_LAYOUT: gl.constexpr = acc.type.layout
    PART_LAYOUT: gl.constexpr = narrower(SUM_LAYOUT, HALF // 2) if DIGITS == 1 else None
    acc = acc.to(gl.float32)
    if x_scale_ptr is not None:
        acc *= x_scale[:, None]
        acc *= scales.index(INDEX).load(gl.SliceLayout(0, SUM_LAYOUT))[None, :]
    if DIGITS == 2:
        gl.static_assert(not GATED and residual_ptr is None)
        acc = combine_digits(acc)
    LAYOUT: gl.constexpr = acc.type.layout
    if bias_ptr is not None:
        weight_rows, inside = rows_of_weight(column, n, N, GATED, gl.SliceLayout(0, LAYOUT))
        acc += gl.load(bias_ptr + first_weight_row + weight_rows, mask=inside, other=0.0).to(gl.float32)[None, :]
    if GATED:
        gates, values = split_columns(acc)
        out = gl.convert_layout(gated_values(gates, values, GATE), narrower(LAYOUT, HALF))
    else:
        out = acc
    if residual_ptr is not None:
        out += residual.to(gl.float32)
    if GATED:
        store_columns(out, target, staging, 0, INDEX, PART_LAYOUT)
    else:
        left, right = split_columns(out)
        store_columns(left, target, staging, 0, INDEX, PART_LAYOUT)
        store_columns(right, target, staging, HALF, INDEX, PART_LAYOUT)
