"""The four linears between one layer's attention and the next one's, for one to four tokens, in one launch.

Each alone ends with memory idle: programs finish, the next kernel starts, rows become codes, and only then are weights asked for.
Here the programs stay, one a multiprocessor, and walk through the linears together: tiles of 16 rows of each weight, shared out
evenly. A warp's ring (see `ring`) is asked for across the ends of tiles and of linears, since weights depend on nothing; it fills while
programs meet, and while each makes the rows' codes anew.

FORM: bfloat16 and float16 (as they are), fp8 (e4m3 codes × e4m3), bytes (int8) and int4 (paired groups, see `quant_int4`), both × a row's
two int8 digits. In shared memory rows are codes in any case. A matrix instruction has eight columns: two of them are a token's, its coarse
and its fine digits, or both the same. Its 32 features are one group's: four lanes hold 8 bytes each of a pair of groups of 32, else 16.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton import activation
from stoker.kernels.triton.fused_layer.linear_args import BIAS, LENGTH, NORM, OUT, RESIDUAL, SCALES, K, N, linked, listed
from stoker.kernels.triton.fused_layer.small_batch.activations import code_bytes, digits_apart, encode_all, is_wide, total_bytes
from stoker.kernels.triton.fused_layer.small_batch.products import (
    add_bytes,
    add_groups,
    group_products,
    piece_bytes,
    row_sums,
    same,
    take_grid,
)
from stoker.kernels.triton.fused_layer.small_batch.schedule import ask, begin, share, slot_bytes
from stoker.kernels.triton.ptx.pipeline import (
    BLOCK_BYTES,
    barrier,
    follow,
    groups_of_block,
    lane_row,
    meet,
    put_float,
    shared_address,
    take_float,
    take_two_rows,
    warp_together,
)

activated = gluon.jit(activation.activated.fn)


@triton.constexpr_function
def shared_places(form, group, zero, depth, warps, blocks, widths, rows, tokens):
    """Where shared memory holds the rows' codes, their groups' sums and the warps' sums, after the rings; and where it ends."""
    codes = depth * warps * slot_bytes(group, zero, blocks)
    totals = codes + tokens * code_bytes(form, widths)
    partial = totals + tokens * total_bytes(widths, group)
    end = partial + 4 * tokens * warps * rows
    return codes, totals, partial, -(-end // 1024) * 1024  # allocated as buffers of 1024 bytes: only their number may be no power of two


@triton.constexpr_function
def has_scales(form):
    """Whether each row has one."""
    return form == "fp8" or form == "bytes"


@triton.constexpr_function
def block_features(form):
    return 256 if form == "int4" else 64 if is_wide(form) else 128


@gluon.jit
def multiply(
    state, slot, links, link, programs, mine, codes, totals, partial, lane, warp,
    GATES: gl.constexpr, GATED: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr,
    DEPTH: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, WIDTHS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The sums of a linear's rows that this warp's features come to, into `partial`. mine: the warp's ring; slot: the next one to take."""
    SLOT: gl.constexpr = slot_bytes(GROUP, ZERO, BLOCKS)
    CODES: gl.constexpr = 256 if FORM == "int4" else 128  # bytes of a block's
    _, tiles = share(link[N], programs)
    TOTALS: gl.constexpr = 4 * groups_of_block(GROUP) * BLOCKS
    code = codes + lane % 4 * 16 + warp * (CODES * BLOCKS) + gl.minimum(lane // 8, TOKENS - 1) * code_bytes(FORM, WIDTHS)
    if FORM == "bytes" or FORM == "int4":
        code += lane // 4 % 2 * digits_apart(WIDTHS)  # even columns are coarse digits
    total = totals + warp * TOTALS + gl.minimum(lane % 4, TOKENS - 1) * total_bytes(WIDTHS, GROUP)
    nothing = lane * 0
    for tile in range(tiles * (2 if GATED else 1)):
        if FORM == "int4":
            sums = same(nothing.to(gl.float32), 2)
        elif FORM == "bytes":
            sums = same(nothing, 8 * BLOCKS)
        else:
            sums = same(nothing.to(gl.float32), 8 * BLOCKS)
        for turn in range(gl.cdiv(link[LENGTH], WARPS * BLOCKS)):
            place = mine + slot * SLOT
            words = take_two_rows(place, lane, piece_bytes(GROUP), BLOCKS, DEPTH - 1)
            at = code + turn * (CODES * WARPS * BLOCKS)
            # Asking for the next slot takes as long as matrix instructions do: it stands where a warp would wait for them.
            if FORM == "int4":
                grid = take_grid(place + BLOCKS * BLOCK_BYTES, lane, SCALE, ZERO, GROUP, BLOCKS)
                warp_together(lane)  # before the slot is asked for again
                products = group_products(words, at, nothing, GROUP, BLOCKS)
            else:
                sums = add_bytes(sums, words, at, FORM, BLOCKS)
            state = ask(state, links, programs, place, lane, warp, GATES, GROUP, ZERO, WARPS, BLOCKS)
            if FORM == "int4":
                sums = add_groups(sums, products, total + turn * (TOTALS * WARPS), grid, ZERO, GROUP, BLOCKS)
            slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
        made = row_sums(sums, FORM, BLOCKS)
        for half in gl.static_range(2):
            at = (lane % 4 * WARPS + warp) * ROWS + tile * 16 + lane_row(lane) + half
            put_float(partial + at * 4, made[half], lane % 4 < TOKENS)
    return state, slot


@gluon.jit
def joined(place, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """The sum over warps."""
    y = take_float(place)
    for warp in gl.static_range(1, WARPS):
        y += take_float(place + 4 * ROWS * warp)
    return y


@gluon.jit
def constants(
    link, programs, thread,
    NORMED: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, FORM: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What a linear reads besides weights that no kernel of a step writes: (this thread's row's scale and bias, those of what it gates, the
    norm's weights). Asked for while the linear before is multiplied."""
    n = link[N]
    first, tiles = share(n, programs)
    row = first * 16 + thread
    ok = thread < tiles * 16
    scale = 1.0
    up_scale = 1.0
    bias = 0.0
    up_bias = 0.0
    norms = 0.0
    if has_scales(FORM):
        scale = gl.load(link[SCALES] + row, mask=ok, other=0.0)
        if GATED:
            up_scale = gl.load(link[SCALES] + n + row, mask=ok, other=0.0)
    if BIASED:
        bias = gl.load(link[BIAS] + row, mask=ok, other=0.0)
        if GATED:
            up_bias = gl.load(link[BIAS] + n + row, mask=ok, other=0.0)
    if NORMED:
        cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
        norms = gl.load(link[NORM] + cols, mask=cols < link[K], other=0.0)
    return scale, up_scale, bias, up_bias, norms


@gluon.jit
def residuals(place, n, ok, TOKENS: gl.constexpr):
    """Of each token, what is added to this thread's row."""
    added = ()
    for token in gl.static_range(TOKENS):
        added = added + (gl.load(place + token * n, mask=ok, other=0.0, cache_modifier=".cg"),)
    return added


@gluon.jit
def run(
    state, slot, early, links, arrived, programs, shared, thread,
    AT: gl.constexpr, GATES: gl.constexpr, BIASES: gl.constexpr, WIDTHS: gl.constexpr, ACT: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One linear, number AT: meet, make codes, multiply, finish this program's rows."""
    link = links[AT]
    GATED: gl.constexpr = GATES[AT]
    ADDS: gl.constexpr = AT % 2 == 0
    places: gl.constexpr = shared_places(FORM, GROUP, ZERO, DEPTH, WARPS, BLOCKS, WIDTHS, ROWS, TOKENS)
    SLOT: gl.constexpr = slot_bytes(GROUP, ZERO, BLOCKS)
    lane = thread % 32
    warp = thread // 32
    codes = shared + places[0]
    totals = shared + places[1]
    partial = shared + places[2]
    scale, up_scale, bias, up_bias, norms = early
    if AT > 0:
        meet(arrived, programs, gl.program_id(0) == 0, thread)
    else:
        follow(thread, USE_PDL)
    steps = encode_all(link, norms, gl.max(codes, 0), gl.max(totals, 0), not ADDS, WIDTHS, AT, FORM, GROUP, WARPS, TOKENS)
    n = link[N]
    first, tiles = share(n, programs)
    row = first * 16 + thread
    ok = thread < tiles * 16
    added = same(0.0, TOKENS)
    if ADDS:
        added = residuals(link[RESIDUAL] + row, n, ok, TOKENS)
    if len(GATES) > AT + 1:
        early = constants(links[AT + 1], programs, thread, ADDS, GATES[AT + 1], BIASES[AT + 1], FORM, WIDTHS[AT + 1], WARPS)
    barrier()
    state, slot = multiply(
        state, slot, links, link, programs, shared + warp * (DEPTH * SLOT), codes, totals, partial, lane, warp,
        GATES, GATED, FORM, GROUP, SCALE, ZERO, DEPTH, WARPS, BLOCKS, WIDTHS, ROWS, TOKENS,
    )  # fmt: skip
    barrier()
    between: gl.constexpr = 32 if GATED else 16  # rows from a tile to the next: what gates gate lies behind them
    for token in gl.static_range(TOKENS):
        place = partial + gl.where(ok, (thread // 16 * between + thread % 16) * 4, 0) + token * (4 * WARPS * ROWS)
        y = joined(place, WARPS, ROWS) * steps[token]
        if has_scales(FORM):
            y *= scale
        if BIASES[AT]:
            y += bias.to(gl.float32)
        if GATED:
            up = joined(place + 64, WARPS, ROWS) * steps[token]
            if has_scales(FORM):
                up *= up_scale
            if BIASES[AT]:
                up += up_bias.to(gl.float32)
            y = activated(y, ACT) * up
        if ADDS:
            y += added[token].to(gl.float32)
        gl.store(link[OUT] + token * n + row, y.to(link[OUT].dtype.element_ty), mask=ok)
    return state, slot, early


@gluon.jit(do_not_specialize=["programs"])
def fused_layer_small_batch_kernel(
    x, norm, eps, weight, scale, zero, bias, residual, out, n, k, stride, blocks, arrived, programs,
    GATES: gl.constexpr, BIASES: gl.constexpr, WIDTHS: gl.constexpr, ACT: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    SCALE: gl.constexpr, ZERO: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (programs,), all of them on the device at once.

    The first 13 have a part for each linear: x [TOKENS, k], norm's weights [k] and epsilon (of the second and the fourth), weight [n (twice
    when gated), row's bytes], scale, zero, bias, residual [TOKENS, n] (of the first and the third), out [TOKENS, n], n, k, bytes from row
    to row, blocks of 128 bytes of a row. Anything stands for what is not there. scale float32 [rows], of int4 SCALE [groups of GROUP, rows]
    with `zero` alike (ZERO none, int, float). Lists with blanks between, since Triton compiles no constant ahead that is a tuple: GATES and
    BIASES, 1 for a linear with them; WIDTHS, powers of two that its k and all turns of a row fit. ROWS: the most of a program, gates and
    what they gate.
    """
    gates: gl.constexpr = listed(GATES)
    biases: gl.constexpr = listed(BIASES)
    widths: gl.constexpr = listed(WIDTHS)
    links = linked((x, norm, eps, weight, scale, zero, bias, residual, out, n, k, stride, blocks), len(gates))
    places: gl.constexpr = shared_places(FORM, GROUP, ZERO, DEPTH, WARPS, BLOCKS, widths, ROWS, TOKENS)
    SLOT: gl.constexpr = slot_bytes(GROUP, ZERO, BLOCKS)
    kept = gl.allocate_shared_memory(gl.int8, [places[3] // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane = thread % 32
    warp = thread // 32
    shared = shared_address(thread)
    early = constants(links[0], programs, thread, False, gates[0], biases[0], FORM, widths[0], WARPS)
    state = begin(links, programs, lane, warp, gates, GROUP, ZERO, WARPS, BLOCKS)
    for slot in range(DEPTH):
        state = ask(state, links, programs, shared + (warp * DEPTH + slot) * SLOT, lane, warp, gates, GROUP, ZERO, WARPS, BLOCKS)
    taken = gl.to_tensor(0)
    for at in gl.static_range(len(gates)):
        state, taken, early = run(
            state, taken, early, links, arrived, programs, shared, thread,
            at, gates, biases, widths, ACT, FORM, GROUP, SCALE, ZERO, DEPTH, WARPS, BLOCKS, ROWS, TOKENS, USE_PDL,
        )  # fmt: skip
    kept._keep_alive()
