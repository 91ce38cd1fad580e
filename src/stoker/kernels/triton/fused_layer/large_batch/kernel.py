"""The four linears between one layer's attention and the next one's, for some tokens against int4, in one launch.

As `small_batch` for one token. The features are cut into parts. A program has one of them, whose tokens stay in shared memory (see
`operand`); each of its four groups of four warps walks through tiles of 64 rows, widens their codes in registers, multiplies them by the
tokens and sends the sums (`split_k`). Programs that have the parts of the same rows share these out, add them in one order, and
store the outputs: row by row where others want them so, and as the operand of the next linear. Then all programs meet.

Weights come through the warps' rings (see `ring`) and depend on nothing, so rings fill while programs meet. A norm's weight goes into the
operand; its factor multiplies the sums.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.scales import exchange_bytes, take_grid
from stoker.kernels.triton.fused_layer.large_batch.schedule import (
    ALL_ROWS,
    COUNT_OF,
    GROUPS,
    TILE,
    TILES,
    WALK_BYTES,
    WARPS,
    ask,
    blocks_of,
    from_linear,
    part_of,
    plan_walks,
    slot_bytes,
    walk_of,
)
from stoker.kernels.triton.fused_layer.large_batch.split_k import columns_at_once, place_of_sums, send_sums, sums_of
from stoker.kernels.triton.fused_layer.linear_args import BIAS, EPS, LENGTH, NORM, OUT, RESIDUAL, K, N, X, linked, listed
from stoker.kernels.triton.fused_layer.small_batch.kernel import activated
from stoker.kernels.triton.fused_layer.small_batch.products import same
from stoker.kernels.triton.ptx.pipeline import (
    BLOCK_BYTES,
    barrier,
    follow,
    meet,
    put_float,
    shared_address,
    take_block,
    take_float,
    take_words,
)
from stoker.kernels.triton.ptx.wgmma import (
    SUM_SCALE,
    add_block,
    ask_tokens,
    block_bytes,
    column_features,
    expect_blocks,
    over_rows,
    place_of,
    put_bricks,
    seen_by_copies,
    seen_by_products,
    take_pieces,
    wait_for_tokens,
    warp_number,
)

MOST_LINEARS = tl.constexpr(4)
THREADS = tl.constexpr(512)
AT_ONCE = tl.constexpr(16)  # squares that a thread asks for at once


@triton.constexpr_function
def shared_places(depth, tokens, blocks, group):
    """Where shared memory holds tokens, squares, copies' barriers, walks and what lanes exchange, after the rings; and where it ends.

    blocks: the most of a part.
    """
    operand = depth * WARPS.value * slot_bytes(group)
    spare = operand + blocks * block_bytes(tokens)
    barriers = spare + 4 * THREADS.value
    walks = -(-(barriers + 3 * 8 * blocks) // 16) * 16
    exchange = walks + (MOST_LINEARS.value + 1) * WARPS.value * WALK_BYTES.value
    end = exchange + WARPS.value * exchange_bytes(group)
    return operand, spare, barriers, walks, exchange, -(-end // 1024) * 1024  # as buffers of 1024 bytes: their number may be any


@gluon.jit
def prepare(link, operand, programs, m, lane, warp, PARTS: gl.constexpr, TOKENS: gl.constexpr, GROUP: gl.constexpr):
    """This program's part of rows x [m, k], as an operand."""
    COLUMNS: gl.constexpr = TOKENS // 8
    firsts: gl.constexpr = column_features(GROUP)
    part, _, _ = part_of(PARTS, programs)
    block, blocks = blocks_of(link[LENGTH], part, PARTS)
    for unit in range(warp, 2 * blocks * COLUMNS, WARPS):
        half = unit // COLUMNS
        token = unit % COLUMNS * 8 + lane % 8
        feature = (block + half // 2) * 256 + half % 2 * GROUP + lane // 8 * 8
        are_there = ()
        for piece in gl.static_range(4):
            are_there = are_there + (((token < m) & (feature + firsts[piece] < link[K])).to(gl.int32),)
        values = take_pieces(link[X].to(gl.int64) + 2 * (token.to(gl.int64) * link[K] + feature), are_there, GROUP)
        place = operand + half * (block_bytes(TOKENS) // 2) + unit % COLUMNS * 256
        put_bricks(place + lane // 8 * (64 * TOKENS) + lane % 8 * 16, values, TOKENS)


@gluon.jit
def fetch(link, operand, barriers, programs, thread, PARTS: gl.constexpr, TOKENS: gl.constexpr):
    """Ask for this program's part of an operand, block by block. For one that multiplies it: nobody else waits for what arrives."""
    part, _, _ = part_of(PARTS, programs)
    block, blocks = blocks_of(link[LENGTH], part, PARTS)
    SIZE: gl.constexpr = block_bytes(TOKENS)
    source = link[X].to(gl.int64) + block.to(gl.int64) * SIZE
    seen_by_copies()
    for i in range(blocks):
        ask_tokens(operand + i * SIZE, source + i * SIZE, barriers + 8 * i, thread, SIZE)


@gluon.jit
def add_squares(link, squares, spare, thread, TOKENS: gl.constexpr):
    """A norm's squares, which `finish` left in memory for every 16 rows, to one number a thread: of token thread % TOKENS."""
    count = link[K] // 16
    total = thread.to(gl.float32) * 0.0
    for first in range(0, count, AT_ONCE * (THREADS // TOKENS)):
        for i in gl.static_range(AT_ONCE):
            entry = first + i * (THREADS // TOKENS) + thread // TOKENS
            total += gl.load(squares + entry * TOKENS + thread % TOKENS, mask=entry < count, other=0.0, cache_modifier=".cg")
    put_float(spare + 4 * thread, total, thread >= 0)


@gluon.jit
def factor_of(link, spare, token, TOKENS: gl.constexpr):
    """The norm's factor of a token."""
    total = take_float(spare + 4 * token)
    for i in gl.static_range(1, THREADS // TOKENS):
        total += take_float(spare + 4 * (i * TOKENS + token))
    return gl.rsqrt(total / link[K] + link[EPS])


@gluon.jit
def multiply(
    state, slot, messages, programs, ring, exchange, operand, barriers, walks, thread, lane, warp,
    COUNT: gl.constexpr, PARTS: gl.constexpr, AT: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr, DEPTH: gl.constexpr,
    TOKENS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Send the sums of this group's tiles over the program's part of the features. slot: of the ring, the next one to take."""
    part, _, step = part_of(PARTS, programs)
    walk = walk_of(walks, AT, warp)
    _, _, blocks, begins = take_words(walk, ALL_ROWS, 4)
    left, tile = take_words(walk, COUNT_OF, 2)
    while left > 0:
        sums = same(lane.to(gl.float32) * 0.0, TOKENS // 2)
        ends = gl.minimum(begins + left, blocks)
        for block in range(begins, ends):
            place = ring + slot * slot_bytes(GROUP)
            words = take_block(place, lane, DEPTH - 1)
            scales, lows = take_grid(place + BLOCK_BYTES, exchange, lane, SCALE, ZERO, GROUP)
            state = ask(state, walks, place, lane, warp, COUNT, GROUP, ZERO)
            slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
            if AT > 0:
                wait_for_tokens(barriers + 8 * block, thread)
            sums = add_block(sums, words, scales, lows, lane * 0 + operand + block * block_bytes(TOKENS), TOKENS)
        place = place_of_sums(messages, tile, part, gl.where(begins > 0, 1, 0), PARTS, TOKENS)
        send_sums(place + thread % 128 * 16, sums, TOKENS)
        left -= ends - begins
        begins = begins * 0
        tile += step
    return state, slot


@gluon.jit
def finish(
    link, norm, operand, messages, squares, spare, tiles, programs, m, thread, lane, warp,
    GATED: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr, NEXT: gl.constexpr, PARTS: gl.constexpr, ACT: gl.constexpr,
    TOKENS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """From sums to outputs: norm, bias, gate, residual. A group of warps has some eights of tokens of a tile at a time, a lane two of each.

    tiles: of this program. NEXT: whether these are the next linear's features, which go into its operand, times its norm's weights after a
    residual, and with the sums of their squares.
    """
    COLUMNS: gl.constexpr = columns_at_once(PARTS, TOKENS)
    UNITS: gl.constexpr = TOKENS // 8 // COLUMNS  # of a tile
    ROWS: gl.constexpr = TILE // 2 if GATED else TILE
    HALVES: gl.constexpr = 1 if GATED else 2
    part, index, step = part_of(PARTS, programs)
    n = link[N]
    # Over programs first: what a multiprocessor takes comes at 32 KB a µs.
    for unit in range(part + warp // 4 * PARTS, tiles * UNITS, PARTS * GROUPS):
        tile = index + unit // UNITS * step
        row = tile * ROWS + warp % 4 * (8 * HALVES) + lane // 4
        first = unit % UNITS * (8 * COLUMNS) + lane % 4 * 2
        # All that is read is asked for before anything is stored: each waits for memory once.
        added = ()
        factors = ()
        for nth in gl.static_range(2 * COLUMNS):
            token = first + (nth // 2 * 8 + nth % 2)
            if ADDS:
                factors = factors + (1.0 / SUM_SCALE,)
            else:
                factors = factors + (factor_of(link, spare, token, TOKENS) * (1.0 / SUM_SCALE),)
            for half in gl.static_range(HALVES):
                if ADDS:
                    at = link[RESIDUAL] + token * n + row + 8 * half
                    added = added + (gl.load(at, mask=token < m, other=0.0, cache_modifier=".cg").to(gl.float32),)
        biases = ()
        norms = ()
        for half in gl.static_range(2):
            if BIASED:
                biases = biases + (gl.load(link[BIAS] + row + half * (n if GATED else 8)).to(gl.float32),)
            if NEXT and ADDS:
                norms = norms + (gl.load(norm + row + 8 * half).to(gl.float32),)
        place = place_of_sums(messages, tile, 0, 0, PARTS, TOKENS) + (unit % UNITS * (2048 * COLUMNS) + thread % 128 * 16)
        sums = sums_of(link, place, unit // UNITS, tiles, thread, PARTS, COLUMNS, TOKENS)
        for nth in gl.static_range(2 * COLUMNS):
            token = first + (nth // 2 * 8 + nth % 2)
            square = thread.to(gl.float32) * 0.0
            for half in gl.static_range(HALVES):
                y = sums[nth // 2 * 4 + 2 * half + nth % 2] * factors[nth]
                if BIASED:
                    y += biases[half]
                if GATED:
                    up = sums[nth // 2 * 4 + 2 + nth % 2] * factors[nth]
                    if BIASED:
                        up += biases[1]
                    y = activated(y, ACT) * up
                if ADDS:
                    y += added[HALVES * nth + half]
                rounded = y.to(gl.bfloat16)
                if not GATED:
                    gl.store(link[OUT] + token * n + row + 8 * half, rounded, mask=token < m)
                if NEXT and ADDS:
                    y = rounded.to(gl.float32)
                    square += y * y
                    rounded = (y * norms[half]).to(gl.bfloat16)
                if NEXT:
                    gl.store(operand + place_of(row + 8 * half, token, TOKENS, GROUP), rounded)
            if NEXT and ADDS:
                gl.store(squares + (tile * 4 + warp % 4) * TOKENS + token, over_rows(square), mask=lane < 4)


@gluon.jit
def run(
    state, slot, links, messages, squares, arrived, programs, m, shared, thread, lane, warp,
    AT: gl.constexpr, GATES: gl.constexpr, BIASES: gl.constexpr, PARTS: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr,
    ZERO: gl.constexpr, DEPTH: gl.constexpr, TOKENS: gl.constexpr, SHARE: gl.constexpr, GROUP: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One linear, number AT: meet, bring the tokens, multiply, finish."""
    link = links[AT]
    ADDS: gl.constexpr = AT % 2 == 0
    NEXT: gl.constexpr = len(GATES) > AT + 1
    places: gl.constexpr = shared_places(DEPTH, TOKENS, SHARE, GROUP)
    operand = shared + places[0]
    spare = shared + places[1]
    barriers = shared + places[2] + (AT - 1) * (8 * SHARE)
    walks = shared + places[3]
    (tiles,) = take_words(walk_of(walks, AT, warp), TILES, 1)
    if AT == 0:
        follow(thread, USE_PDL)
        prepare(link, operand, programs, m, lane, warp, PARTS[0], TOKENS, GROUP)
        seen_by_products(thread)
        barrier()
    else:
        meet(arrived, programs, gl.program_id(0) == 0, thread)
        if tiles > 0:
            fetch(link, operand, barriers, programs, thread, PARTS[AT], TOKENS)
    state, slot = multiply(
        state, slot, messages, programs, shared + warp * (DEPTH * slot_bytes(GROUP)),
        shared + places[4] + warp * exchange_bytes(GROUP), operand, barriers, walks, thread, lane, warp,
        len(GATES), PARTS[AT], AT, SCALE, ZERO, DEPTH, TOKENS, GROUP,
    )  # fmt: skip
    if not ADDS:
        add_squares(link, squares, spare, thread, TOKENS)
        barrier()
    after = links[AT + 1 if NEXT else AT]
    finish(
        link, after[NORM], after[X], messages, squares, spare, tiles, programs, m, thread, lane, warp,
        GATES[AT], BIASES[AT], ADDS, NEXT, PARTS[AT], ACT, TOKENS, GROUP,
    )  # fmt: skip
    return state, slot


@gluon.jit(do_not_specialize=["programs", "m"])
def fused_layer_large_batch_kernel(
    x, norm, eps, weight, scale, zero, bias, residual, out, n, k, stride, blocks, messages, squares, arrived, programs, m,
    GATES: gl.constexpr, BIASES: gl.constexpr, PARTS: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr,
    DEPTH: gl.constexpr, TOKENS: gl.constexpr, SHARE: gl.constexpr, GROUP: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (programs,), all of them on the device at once.

    The first 13 have a part for each linear, as in `small_batch/kernel.py`. All 16-bit rows are bfloat16: x [m, k] of the first, room for
    operands [k × TOKENS] of the others; residual and out [m, n] (no out of a gated one); blocks of 128 bytes of a row. m is TOKENS at most.
    messages float32 [tiles × parts, 2, TOKENS × 64] of the linear with the most, zeros; squares float32 [hidden / 16, TOKENS]; arrived
    int32 [1] (see `meet`). Lists with blanks between: GATES, BIASES, 1 for a linear with them; PARTS of its features. SHARE: the most
    blocks of a part. GROUP: 32, 64 or 128 features that share a scale.
    """
    gates: gl.constexpr = listed(GATES)
    biases: gl.constexpr = listed(BIASES)
    parts: gl.constexpr = listed(PARTS)
    links = linked((x, norm, eps, weight, scale, zero, bias, residual, out, n, k, stride, blocks), len(gates))
    places: gl.constexpr = shared_places(DEPTH, TOKENS, SHARE, GROUP)
    kept = gl.allocate_shared_memory(gl.int8, [places[5] // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Triton declares shared memory to the assembler only where an operation of its own uses it.
    last = kept.index(places[5] // 1024 - 1)
    last.store(gl.zeros([1024], gl.int8, gl.BlockedLayout([2], [32], [WARPS], [0])))
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane = thread % 32
    warp = warp_number()
    shared = shared_address(gl.to_tensor(0))
    barrier()
    expect_blocks(shared + places[2], 3 * SHARE, thread)
    walks = shared + places[3]
    if warp * 32 < WARPS * (len(gates) + 1):
        plan_walks(links, programs, walks, thread, gates, parts, GROUP, ZERO)
    barrier()
    ring = shared + warp * (DEPTH * slot_bytes(GROUP))
    state = from_linear(walks, gl.to_tensor(0), lane, warp, len(gates), GROUP, ZERO)
    for slot in range(DEPTH):
        state = ask(state, walks, lane * 0 + ring + slot * slot_bytes(GROUP), lane, warp, len(gates), GROUP, ZERO)
    taken = gl.to_tensor(0)
    for at in gl.static_range(len(gates)):
        state, taken = run(
            state, taken, links, messages, squares, arrived, programs, m, shared, thread, lane, warp,
            at, gates, biases, parts, ACT, SCALE, ZERO, DEPTH, TOKENS, SHARE, GROUP, USE_PDL,
        )  # fmt: skip
    last._keep_alive()
