"""Linears of quantized weights, and of stacked experts: one kernel that streams tiles of a weight past tiles of rows.

Weights are the left operand, so that a matrix instruction's long side is full of them however few the rows are. FORM says what a tile of
weights goes through:
  same   nothing: weight and rows have one dtype (int8 and float8_e4m3fn codes, or unquantized experts)
  wide   8-bit weights become the rows' dtype in registers
  block  both are e4m3; each tile of rows × features has a scale, and so has each row's share of those features
  groups int8, each row's groups of features with a scale (and an offset) of their own; against int8 digits or plain rows. Experts only
  int4   two codes a byte; against int8 digits (see quant_codes) they are multiplied as int8, against plain rows they become their dtype
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.gemm.quantized.activations import encode, row_step
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from stoker.kernels.triton.ptx.unpack import dequantize_16bit, int4_bias, unpack_8bit, unpack_int4, unpack_int4_biased

LATE_GROUP = tl.constexpr(64)  # from this size of groups on their sums are scaled, not their widened codes, for up to LATE_TOKENS
LATE_TOKENS = tl.constexpr(32)


@triton.jit
def nth_tile(unit, m_tiles, n_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of weights) of a program: GROUP tiles of rows take turns at each weight tile while it is in the cache."""
    width = GROUP * n_tiles
    first = unit // width * GROUP
    high = tl.minimum(m_tiles - first, GROUP)
    return first + unit % width % high, unit % width // high


@triton.jit
def expert_rows(tile, offsets, num_rows, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, end) of a tile in the list of all segments' tiles; expert -1: rows of nobody here. end ≤ first: no such tile.

    Segments are the rows before offsets[0], each expert's, and those from offsets[EXPERTS] on.
    """
    segment = tl.arange(0, BLOCK)
    begin = tl.load(offsets + segment - 1, mask=(segment > 0) & (segment < EXPERTS + 2), other=0)
    end = tl.load(offsets + segment, mask=segment < EXPERTS + 1, other=num_rows)
    end = tl.where(segment < EXPERTS + 2, end, begin)
    tiles = tl.where(segment < EXPERTS + 2, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    after = tl.cumsum(tiles, 0)
    mine = tl.sum((after <= tile).to(tl.int32), 0)
    here = segment == mine
    first = tl.sum(tl.where(here, begin + (tile - after + tiles) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(here, end, 0), 0)
    return tl.where((mine > 0) & (mine <= EXPERTS), mine - 1, -1), first, last


@triton.jit
def take(pointers, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def add_product(
    acc, w_rows, v, cols, k, scale_rows, FORM: tl.constexpr, EVEN_K: tl.constexpr, PACKED: tl.constexpr, row_scale,
    IMPRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + W[rows, cols] × v, weights of one byte or more. FORM block: scale_rows [BLOCK_N] and row_scale [COLS] are these columns'."""
    w = take(w_rows[:, None] + cols[None, :], (cols < k)[None, :], not EVEN_K)
    if FORM == "wide":
        w = unpack_8bit(w, v.dtype, PACKED)
    if FORM == "block":
        part = tl.dot(w, v, max_num_imprecise_acc=IMPRECISE)
        return acc + part * scale_rows[:, None] * row_scale[None, :]
    else:
        return tl.dot(w, v, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)


@triton.jit
def add_group(acc, w, v, sums, scale, zero, place, ZERO: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + the product of one group of int8, whose rows' scales lie at `place`. `sums` [TOKENS] of v, where v is digits."""
    s = tl.load(scale + place).to(tl.float32)
    if v.dtype == tl.int8:
        acc += joined_digits(tl.dot(w, v, out_dtype=tl.int32)).to(tl.float32) * s[:, None]
        total = sums
    else:
        acc += tl.dot(unpack_8bit(w, v.dtype, PACKED), v, input_precision=PRECISION) * s[:, None]
        total = tl.sum(v.to(tl.float32), 0)
    if ZERO == "float":
        acc += tl.load(zero + place).to(tl.float32)[:, None] * total[None, :]
    return acc


@triton.jit
def add_int4(acc, codes, low_v, high_v, sums, grid, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """acc + the products of two neighbouring groups: the low nibbles are one's codes, the high ones the next one's."""
    low_grid = grid[: len(grid) // 2]
    high_grid = grid[len(grid) // 2 :]
    if low_v.dtype == tl.int8:
        low, high = unpack_int4(codes, PACKED)
        s, b = grid_of(low_grid, ZERO)
        acc = (acc + b[:, None] * sums[0][None, :]) + joined_digits(tl.dot(low, low_v, out_dtype=tl.int32)).to(tl.float32) * s[:, None]
        s, b = grid_of(high_grid, ZERO)
        acc = (acc + b[:, None] * sums[1][None, :]) + joined_digits(tl.dot(high, high_v, out_dtype=tl.int32)).to(tl.float32) * s[:, None]
    else:
        low, high = unpack_int4_biased(codes, low_v.dtype, PACKED)
        if ZERO != "float" and codes.shape[1] >= LATE_GROUP and acc.shape[1] <= LATE_TOKENS:
            acc += tl.dot(whole_nibbles(low, low_grid, ZERO, PACKED), low_v, input_precision="ieee") * low_grid[0].to(tl.float32)[:, None]
            acc += (
                tl.dot(whole_nibbles(high, high_grid, ZERO, PACKED), high_v, input_precision="ieee") * high_grid[0].to(tl.float32)[:, None]
            )
        else:
            acc = tl.dot(scaled_nibbles(low, low_grid, ZERO, PACKED), low_v, acc, input_precision="ieee")
            acc = tl.dot(scaled_nibbles(high, high_grid, ZERO, PACKED), high_v, acc, input_precision="ieee")
    return acc


@triton.jit
def whole_nibbles(codes, grid, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """code - zero point of `unpack_int4_biased`, exactly."""
    base: tl.constexpr = int4_bias(codes.dtype)
    if ZERO == "none":
        zero = base + 8.0
    else:
        zero = (base + grid[1].to(tl.float32))[:, None]
    if PACKED:
        if ZERO == "int":
            zero = zero.to(codes.dtype)
        return (codes - zero).to(codes.dtype)
    else:  # which knows no arithmetic of bfloat16
        return (codes.to(tl.float32) - zero).to(codes.dtype)


@triton.jit
def scaled_nibbles(codes, grid, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """Values of `unpack_int4_biased`: (code - zero point) × scale, exact but for the product, or code × scale + low where ZERO is float."""
    base: tl.constexpr = int4_bias(codes.dtype)
    scale = grid[0].to(codes.dtype)[:, None]
    if ZERO == "none":
        zero = base + 8.0
    elif ZERO == "int":
        zero = (base + grid[1].to(tl.float32))[:, None]
    else:
        zero = base
    if PACKED and codes.dtype.primitive_bitwidth == 16:
        zero = (tl.zeros_like(scale) + zero).to(codes.dtype)
        if ZERO == "float":
            return dequantize_16bit(codes, zero, scale, grid[1].to(codes.dtype)[:, None])
        else:
            return dequantize_16bit(codes, zero, scale, None)
    else:
        made = (codes.to(tl.float32) - zero) * scale.to(tl.float32)
        if ZERO == "float":
            made += grid[1].to(tl.float32)[:, None]
        return made.to(codes.dtype)


@triton.jit
def stored_grid(scale, zero, place, ZERO: tl.constexpr):
    """What `grid_of` reads, as stored."""
    if ZERO == "none":
        return (tl.load(scale + place),)
    else:
        return (tl.load(scale + place), tl.load(zero + place))


@triton.jit
def grid_of(stored, ZERO: tl.constexpr):
    """float32 (scale, low) of a group: a value is code × scale + low. ZERO: none (codes around 8), int (whole zero points), float (low)."""
    s = stored[0].to(tl.float32)
    if ZERO == "none":
        return s, s * -8.0
    elif ZERO == "int":
        return s, -s * stored[1].to(tl.float32)
    else:
        return s, stored[1].to(tl.float32)


@triton.jit
def take_grids(scale, zero, col, rows, n, ZERO: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, GATED: tl.constexpr):
    """The grids of UNITS pairs of groups of int4 from feature `col` on, by row: of each pair both groups', then those of the `up` rows."""
    LINES = n * (2 if GATED else 1)
    made = ()
    for part in tl.static_range(UNITS):
        place = (col // GROUP + 2 * part) * LINES + rows
        made = made + stored_grid(scale, zero, place, ZERO) + stored_grid(scale, zero, place + LINES, ZERO)
        if GATED:
            made = made + stored_grid(scale, zero, place + n, ZERO) + stored_grid(scale, zero, place + n + LINES, ZERO)
    return made


@triton.jit
def joined_digits(acc):
    """[BLOCK_N, TOKENS] of [BLOCK_N, each token's coarse and fine digit]. A group's sums fit int32."""
    coarse, fine = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return coarse * 254 + fine


@triton.jit
def whole_sums(acc, DIGITS: tl.constexpr, TOKENS: tl.constexpr):
    """float32 [BLOCK_N, TOKENS]: digits that are still apart are joined, over all features, so as floats."""
    if DIGITS == 2 and acc.shape[1] != TOKENS:
        return joined_digits(acc.to(tl.float32))
    else:
        return acc.to(tl.float32)


@triton.jit
def finish(
    y, up, rows, kept, columns, known, scale, row_scale, bias, residual, out, n, stride_out,
    GATED: tl.constexpr, ACT: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """From sums [BLOCK_N, TOKENS] to the output: scales, bias, activation, residual. `columns` are rows of out, `known` if so."""
    if row_scale is not None:
        y = y * row_scale[None, :]
    if GATED and row_scale is not None:
        up = up * row_scale[None, :]
    if BY_ROW:
        y = y * tl.load(scale + rows, mask=kept, other=0.0)[:, None]
        if GATED:
            up = up * tl.load(scale + n + rows, mask=kept, other=0.0)[:, None]
    if bias is not None:
        y += tl.load(bias + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + n + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = activated(y, ACT) * up
    place = columns.to(tl.int64)[None, :] * stride_out + rows[:, None]
    inside = kept[:, None] & known[None, :]
    if residual is not None:
        y += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "m_tiles"])
def quant_linear_kernel(
    x, row_scale, x_sums, weight, scale, zero, bias, residual, out, partial, arrived, raw, norm_weight, input_scale, order, offsets,
    m, m_tiles, n, k, stride_x, stride_w, stride_out, raw_k, eps,
    FORM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BY_ROW: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    UNITS: tl.constexpr, ZERO: tl.constexpr, DIGITS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, TOP_K: tl.constexpr, SCATTER: tl.constexpr,
    ENCODE: tl.constexpr, NORM: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    PACKED: tl.constexpr, IMPRECISE: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (m_tiles × ceil(n / BLOCK_N), SPLITS).

    x [DIGITS × M, k] where M is m, or with TOP_K m ÷ TOP_K tokens; row_scale float32 [M], or for FORM block [ceil(k / GROUP), M]; x_sums
    float32 [groups, M]. weight [(EXPERTS,) n (twice when GATED), stride_w], scale by FORM: [(EXPERTS,) n] (BY_ROW),
    [(EXPERTS,) ceil(n / BLOCK_ROWS), ceil(k / GROUP)] (block), [EXPERTS, n, ceil(k / GROUP)] (groups, with `zero` alike),
    [(EXPERTS,) groups, n] (int4, with `zero` alike).
    With EXPERTS, row r of the m sorted choices is order[r]; its x is row order[r] // TOP_K, or r itself when TOP_K is 0; its result
    is row r of out, or row order[r] with SCATTER.
    ENCODE (m is 1): x, row_scale and x_sums are written here first, from `raw` [raw_k]: every program writes what it reads, all alike.
    partial float32 [tiles, SPLITS, (1 or 2) × BLOCK_N, TOKENS]; arrived [tiles] counts finished splits and is left at zero.
    """
    COLS: tl.constexpr = DIGITS * TOKENS
    unit = tl.program_id(0)
    split = tl.program_id(1)
    m_tile, n_tile = nth_tile(unit, m_tiles, tl.cdiv(n, BLOCK_N), 8)
    rows = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = rows < n
    safe = tl.where(kept, rows, 0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    token = m_tile * TOKENS + tl.arange(0, TOKENS)
    known = token < m
    digit = tl.arange(0, COLS) % DIGITS  # a token's digits are neighbours: one thread has both sums
    num_x = m
    source = digit * m + tl.minimum(m_tile * TOKENS + tl.arange(0, COLS) // DIGITS, m - 1)
    target = token
    if EXPERTS > 0:
        expert, first, end = expert_rows(m_tile, offsets, m, EXPERTS, EXPERT_BLOCK, TOKENS)
        if first >= end:
            return
        token = first + tl.arange(0, TOKENS)
        known = token < end
        target = token
        if SCATTER:
            target = tl.load(order + tl.minimum(token, end - 1))
        if expert < 0:
            none = tl.zeros([BLOCK_N, TOKENS], tl.float32).to(out.dtype.element_ty)
            tl.store(out + target.to(tl.int64)[None, :] * stride_out + rows[:, None], none, mask=kept[:, None] & known[None, :])
            return
        known_scale = tl.minimum(token, end - 1)
        source = tl.minimum(first + tl.arange(0, COLS) // DIGITS, end - 1)
        if TOP_K > 0:
            num_x = m // TOP_K
            known_scale = tl.load(order + known_scale) // TOP_K
            source = tl.load(order + source) // TOP_K
        source += digit * num_x
        weight += expert.to(tl.int64) * n * stride_w
        if BY_ROW:
            scale += expert * n
        if FORM == "int4":
            scale += expert.to(tl.int64) * (k // GROUP) * n
            if ZERO != "none":
                zero += expert.to(tl.int64) * (k // GROUP) * n
        if FORM == "groups":
            scale += expert.to(tl.int64) * n * tl.cdiv(k, GROUP)
            if ZERO != "none":
                zero += expert.to(tl.int64) * n * tl.cdiv(k, GROUP)
        if FORM == "block":
            scale += expert.to(tl.int64) * tl.cdiv(n, BLOCK_ROWS) * tl.cdiv(k, GROUP)
        if bias is not None:
            bias += expert * n
    else:
        known_scale = tl.minimum(token, m - 1)

    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * share
    stop = tl.minimum(k, begin + share)
    if ENCODE:
        factor, step = row_step(raw, norm_weight, input_scale, raw_k, eps, NORM, LIMIT, CHUNK)
        encode(raw, norm_weight, x, stride_x, x_sums, 1, factor, step, raw_k, begin, stop, NORM, DIGITS, GROUP, CHUNK)
        tl.store(row_scale, step)
        tl.debug_barrier()  # other threads of this program read what was written

    ACC: tl.constexpr = tl.int32 if FORM == "same" and x.dtype.element_ty == tl.int8 else tl.float32
    SUMS: tl.constexpr = TOKENS if FORM == "int4" or FORM == "groups" else COLS  # their digits are joined group by group
    acc = tl.zeros([BLOCK_N, SUMS], ACC)
    acc_up = acc
    x_rows = x + source.to(tl.int64)[None, :] * stride_x
    w_rows = weight + safe * stride_w
    up_rows = w_rows
    if GATED:
        up_rows = weight + (safe + n) * stride_w
    EACH: tl.constexpr = 2 if ZERO == "none" else 4  # tensors of a pair of groups' grids
    # Beside digits a turn asks for the next one's grids: read where they are used they would hold it up for a trip to memory. Where they
    # scale operands, grids from the turn before would send the operands through shared memory once more.
    AHEAD: tl.constexpr = FORM == "int4" and DIGITS == 2
    if AHEAD:
        ahead = take_grids(scale, zero, tl.minimum(begin, k - BLOCK_K), safe, n, ZERO, GROUP, UNITS, GATED)
    for start in range(begin, stop, BLOCK_K):
        if FORM == "int4":
            if AHEAD:
                grids = ahead
                ahead = take_grids(scale, zero, tl.minimum(start + BLOCK_K, k - BLOCK_K), safe, n, ZERO, GROUP, UNITS, GATED)
            else:
                grids = take_grids(scale, zero, start, safe, n, ZERO, GROUP, UNITS, GATED)
            for part in tl.static_range(UNITS):
                first_col = start + part * 2 * GROUP
                sums = ()
                if DIGITS == 2:
                    place = x_sums + (first_col // GROUP) * num_x + known_scale
                    sums = (tl.load(place), tl.load(place + num_x))
                cols = first_col + tl.arange(0, GROUP)
                low_v = take(x_rows + cols[:, None], (cols < raw_k)[:, None], not EVEN_K)
                high_v = take(x_rows + GROUP + cols[:, None], (cols + GROUP < raw_k)[:, None], not EVEN_K)
                bytes_ = first_col // 2 + tl.arange(0, GROUP)
                grid = grids[EACH * part * (2 if GATED else 1) :]
                codes = tl.load(w_rows[:, None] + bytes_[None, :])
                acc = add_int4(acc, codes, low_v, high_v, sums, grid[:EACH], ZERO, PACKED)
                if GATED:
                    codes = tl.load(up_rows[:, None] + bytes_[None, :])
                    acc_up = add_int4(acc_up, codes, low_v, high_v, sums, grid[EACH : 2 * EACH], ZERO, PACKED)
        elif FORM == "groups":
            tl.static_assert(not GATED)
            for part in tl.static_range(UNITS):
                cols = start + part * GROUP + tl.arange(0, GROUP)
                v = take(x_rows + cols[:, None], (cols < raw_k)[:, None], not EVEN_K)
                w = take(w_rows[:, None] + cols[None, :], (cols < k)[None, :], not EVEN_K)
                group = start // GROUP + part
                sums = None
                if DIGITS == 2:
                    sums = tl.load(x_sums + group * num_x + known_scale)
                acc = add_group(acc, w, v, sums, scale, zero, safe * tl.cdiv(k, GROUP) + group, ZERO, PACKED, PRECISION)
        else:
            cols = start + tl.arange(0, BLOCK_K)
            v = take(x_rows + cols[:, None], (cols < k)[:, None], not EVEN_K)
            by_rows = None
            by_rows_up = None
            by_column = None
            if FORM == "block":
                group = start // GROUP
                by_column = tl.load(row_scale + group * num_x + known_scale)
                by_rows = tl.load(scale + safe // BLOCK_ROWS * tl.cdiv(k, GROUP) + group)
                if GATED:
                    by_rows_up = tl.load(scale + (safe + n) // BLOCK_ROWS * tl.cdiv(k, GROUP) + group)
            acc = add_product(acc, w_rows, v, cols, k, by_rows, FORM, EVEN_K, PACKED, by_column, IMPRECISE, PRECISION)
            if GATED:
                acc_up = add_product(acc_up, up_rows, v, cols, k, by_rows_up, FORM, EVEN_K, PACKED, by_column, IMPRECISE, PRECISION)

    acc = whole_sums(acc, DIGITS, TOKENS)
    acc_up = whole_sums(acc_up, DIGITS, TOKENS) if GATED else acc
    factors = None
    if row_scale is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if FORM != "block":
            factors = tl.load(row_scale + known_scale)
    if SPLITS == 1:
        finish(
            acc, acc_up, rows, kept, target, known, scale, factors, bias, residual, out, n, stride_out, GATED, ACT, BY_ROW,
        )  # fmt: skip
    else:
        LINES: tl.constexpr = (2 if GATED else 1) * BLOCK_N
        lane = tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        mine = partial + (unit * SPLITS + split).to(tl.int64) * (LINES * TOKENS)
        tl.store(mine + lane, acc)
        if GATED:
            tl.store(mine + BLOCK_N * TOKENS + lane, acc_up)
        tl.debug_barrier()
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrived + unit, 0)
            total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            total_up = total
            for other in range(SPLITS):
                theirs = partial + (unit * SPLITS + other).to(tl.int64) * (LINES * TOKENS)
                total += tl.load(theirs + lane)
                if GATED:
                    total_up += tl.load(theirs + BLOCK_N * TOKENS + lane)
            finish(
                total, total_up, rows, kept, target, known, scale, factors, bias, residual, out, n, stride_out, GATED, ACT, BY_ROW,
            )  # fmt: skip
