"""A consumer of the warp-specialized prefill kernel: scores, online softmax and weighted values of 64 rows of each query tile.

Two consumers of one warpgroup each share every tile of keys. Within a consumer the product of scores of a tile is issued before the
product of values of the tile before it, so that the softmax runs while the tensor cores multiply values; and the two consumers issue their
products in turn, so that the softmax of one runs while the tensor cores work for the other (FlashAttention-3, arXiv 2407.08608):

    consumer 0   | QK i   PV i-1 | softmax i          | QK i+1 PV i  | softmax i+1
    consumer 1   | softmax i-1   | QK i   PV i-1      | softmax i    | QK i+1 PV i

Keys stored less a mean (`KVCache.key_mean`): a key tile lies within the positions of one mean, so the mean adds one number per row to all
scores of the tile, `mean_scores`, which the softmax adds to the maximum instead of to the scores. It changes once in `mean_tokens()` keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from stoker.kernels.triton.attention.query_tile import LOG2E, LOWEST
from stoker.kernels.triton.attention.warp_specialized.pipeline import (
    BLOCK_N,
    K_STAGES,
    NUM_FIELDS,
    TERMS,
    V_STAGES,
    end_turn,
    read_field,
    swizzled_layout,
    vector_layout,
    wait_for_turn,
)
from stoker.kernels.triton.attention.warp_specialized.queries import (
    load_mean,
    mean_layout,
    mean_scores,
    read_queries,
    scores_layout,
    split_queries,
)
from stoker.kernels.triton.kv_pages import mean_tokens


@gluon.constexpr_function
def output_layout(size):
    """The layout of weighted values [64, size] in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])


@gluon.constexpr_function
def weights_layout(size):
    """The layout of weights [64, BLOCK_N] as the left operand of the product with values. It moves no value between threads."""
    return gl.DotOperandLayout(0, output_layout(size), 2)


@gluon.jit
def softmax(scores, start, positions, mean_score, highest, total, factor, CONFIG: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr):
    """(weights, highest, total, fade): see `softmax.attend` for their definitions.

    MASKED: some rows may not see some keys. FIRST: the tile may have the first key of a sequence, which is stored whole, less no mean.
    """
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout(CONFIG.key_bits)))
    if CONFIG.has_mean and FIRST:
        scores = gl.where((cols == 0)[None, :] & (start == 0), scores - mean_score[:, None], scores)
    if MASKED:
        # +∞ or −∞ from the sign of a difference. Predicates would be computed before the scores arrive, and packed into bits: 2 % slower.
        room = (positions - start)[:, None] - cols[None, :]
        scores = gl.minimum(scores, ((room & -0x80000000) | 0x7F800000).to(gl.float32, bitcast=True))
        if CONFIG.window is not None:
            room = cols[None, :] - (positions - start - CONFIG.window + 1)[:, None]
            scores = gl.minimum(scores, ((room & -0x80000000) | 0x7F800000).to(gl.float32, bitcast=True))
    row_factor = factor
    if CONFIG.key_bits == 8:
        row_factor = factor[:, None]
    if CONFIG.has_mean:
        bias = mean_score * factor
        raised = gl.maximum(highest, gl.max(scores, 1) * factor + bias)
        weights = gl.exp2(scores * row_factor - (raised - bias)[:, None])
    else:
        raised = gl.maximum(highest, gl.max(scores, 1) * factor)
        weights = gl.exp2(scores * row_factor - raised[:, None])
    fade = gl.exp2(highest - raised)
    return weights, raised, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def issue_scores(q, k, CONFIG: gl.constexpr):
    """Issue scores [64, BLOCK_N] = q [64, size] × k [BLOCK_N, size]ᵀ, with e4m3 keys the sum over the terms of q.

    The tensor cores add e4m3 products in about 14 bits, relative to the largest. The small terms come first: so their sum is exact to more.
    """
    zero = gl.zeros([64, BLOCK_N], gl.float32, scores_layout(CONFIG.key_bits))
    if CONFIG.key_bits == 16:
        return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma(q.slice(64 * (TERMS - 1), 64), k.permute((1, 0)), zero, use_acc=False, is_async=True)
    for term in gl.static_range(1, TERMS):
        scores = warpgroup_mma(q.slice(64 * (TERMS - 1 - term), 64), k.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def attend_tiles(
    state,
    q,
    buffers,
    tiles,
    used,
    positions,
    factor,
    CONSUMER: gl.constexpr,
    CONFIG: gl.constexpr,
    MASKED: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Add key tiles to the running softmax, downward. Returns (state, used).

    `q`: the queries in shared memory. `tiles`: (last, first, begin): key tiles last … first, of a query tile whose key tiles begin at
    `begin`. `used`: the use of the buffers for tile `last`. The state includes the weights of the tile before, whose product with its
    values is issued here, and its `mean_scores`.
    """
    k, v, means, k_full, k_empty, v_full, v_empty = buffers
    last, first, begin = tiles
    acc, weights, mean_score, highest, total = state
    for i in range(last - first + 1):
        tile = last - i
        stage = used % K_STAGES
        before = (used - 1) % V_STAGES
        wait_for_turn(CONSUMER)
        scores = issue_scores(q, k.index(stage), CONFIG)
        mbarrier.wait(v_full.index(before), (used - 1) // V_STAGES & 1)
        acc = warpgroup_mma(weights, v.index(before), acc, is_async=True)
        end_turn(CONSUMER)
        if CONFIG.has_mean:  # noqa: SIM102 - the outer condition is a constant, the inner one is not
            if (tile + 1) * BLOCK_N % mean_tokens() == 0:
                mean = means.index(stage).load(mean_layout(CONFIG.key_bits))
                mean_score = mean_scores(read_queries(q, CONFIG), mean, CONFIG)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        start = tile * BLOCK_N
        fresh, highest, total, fade = softmax(scores, start, positions, mean_score, highest, total, factor, CONFIG, MASKED, FIRST)
        fresh = fresh.to(v.dtype)
        # Waiting for the next keys here keeps the assembler from moving the wait for the product before the softmax.
        used += 1
        mbarrier.wait(k_full.index(used % K_STAGES), used // K_STAGES & 1, pred=tile > begin)
        acc, weights, fresh = warpgroup_mma_wait(0, deps=[acc, weights, fresh])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, output_layout(CONFIG.size)))[:, None]
        weights = gl.convert_layout(fresh, weights_layout(CONFIG.size))
    return (acc, weights, mean_score, highest, total), used


@gluon.jit
def store_result(out, out_ptr, staging, empty, tile, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Store out [64, size] through `staging`, the shared memory of the queries, and release that."""
    token, num_queries, head_tile = tile
    GROUP_TILES: gl.constexpr = (CONFIG.group + CONFIG.heads - 1) // CONFIG.heads
    LAYOUT: gl.constexpr = vector_layout(CONFIG.size, 2)
    staging.store(out)
    out = staging.load(LAYOUT)
    mbarrier.arrive(empty, count=1)
    m = 64 * CONSUMER + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, CONFIG.size, gl.SliceLayout(0, LAYOUT))
    head = head_tile % GROUP_TILES * CONFIG.heads + m % CONFIG.heads
    inside = (m // CONFIG.heads < num_queries) & (m < CONFIG.tokens * CONFIG.heads) & (head < CONFIG.group)
    first_head = head_tile // GROUP_TILES * CONFIG.group
    rows_ptr = out_ptr + ((token + m // CONFIG.heads).to(gl.int64) * CONFIG.num_heads + first_head + head) * CONFIG.size
    gl.store(rows_ptr[:, None] + cols[None, :], out, mask=inside[:, None] & (cols >= 0)[None, :])


@gluon.jit
def consume(outputs, scale, queries, buffers, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute rows 64 × CONSUMER : 64 × CONSUMER + 64 of every tile that the producer sends. `outputs`: out_ptr and optional inputs."""
    out_ptr, sinks_ptr, key_scale_ptr, value_scale_ptr, key_mean_ptr, stride_mean_head = outputs
    q, tile, q_full, q_empty, tile_full = queries
    k, v, _means, k_full, k_empty, v_full, v_empty = buffers
    SIZE: gl.constexpr = CONFIG.size
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    GROUP_TILES: gl.constexpr = (CONFIG.group + CONFIG.heads - 1) // CONFIG.heads
    ROWS: gl.constexpr = gl.SliceLayout(1, scores_layout(CONFIG.key_bits))
    m = 64 * CONSUMER + gl.arange(0, 64, ROWS)
    if CONSUMER == 1:
        end_turn(1)
    received = 0
    used = 0
    mbarrier.wait(tile_full.index(0), 0)
    end_tile = read_field(tile.index(0))
    while end_tile > 0:
        stage = received % Q_STAGES
        begin = read_field(tile.index(stage * NUM_FIELDS + 1))
        end_unmasked = read_field(tile.index(stage * NUM_FIELDS + 2))
        first_unmasked = read_field(tile.index(stage * NUM_FIELDS + 3))
        token = read_field(tile.index(stage * NUM_FIELDS + 4))
        num_queries = read_field(tile.index(stage * NUM_FIELDS + 5))
        positions = read_field(tile.index(stage * NUM_FIELDS + 6)) + m // CONFIG.heads
        head_tile = read_field(tile.index(stage * NUM_FIELDS + 7))
        kv_head = head_tile // GROUP_TILES
        factor = scale * LOG2E
        if key_scale_ptr is not None:
            factor = factor * gl.load(key_scale_ptr + kv_head)
        highest = gl.full([64], LOWEST, gl.float32, ROWS)
        total = gl.zeros([64], gl.float32, ROWS)
        if sinks_ptr is not None:
            head = head_tile % GROUP_TILES * CONFIG.heads + m % CONFIG.heads
            sinks_ptrs = sinks_ptr + kv_head * CONFIG.group + head
            highest = gl.load(sinks_ptrs, mask=head < CONFIG.group, other=0.0) * LOG2E
            total += 1.0
        last = end_tile - 1
        mean = None
        if CONFIG.has_mean:
            mean_ptr = key_mean_ptr + kv_head.to(gl.int64) * stride_mean_head
            mean = load_mean(mean_ptr, last, CONFIG)  # while the queries arrive
        mbarrier.wait(q_full.index(stage), received // Q_STAGES & 1)
        q_rows = q.index(2 * stage + CONSUMER)
        q_tile = q_rows
        mean_score = gl.zeros([64], gl.float32, ROWS)
        if CONFIG.key_bits == 8:
            q_tile, unit, mean_score = split_queries(q_rows, mean, k.dtype, CONFIG)
            factor = factor * unit
        elif CONFIG.has_mean:
            mean_score = mean_scores(read_queries(q_tile, CONFIG), mean, CONFIG)

        # The last key tile has no tile before it whose values could be multiplied.
        key_stage = used % K_STAGES
        mbarrier.wait(k_full.index(key_stage), used // K_STAGES & 1)
        fence_async_shared()  # the queries were copied with cp.async
        wait_for_turn(CONSUMER)
        scores = issue_scores(q_tile, k.index(key_stage), CONFIG)
        end_turn(CONSUMER)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(key_stage), count=1)
        weights, highest, total, _ = softmax(scores, last * BLOCK_N, positions, mean_score, highest, total, factor, CONFIG, True, True)
        weights = gl.convert_layout(weights.to(v.dtype), weights_layout(SIZE))
        used += 1
        mbarrier.wait(k_full.index(used % K_STAGES), used // K_STAGES & 1, pred=last > begin)

        state = (gl.zeros([64, SIZE], gl.float32, output_layout(SIZE)), weights, mean_score, highest, total)
        masked = gl.maximum(begin, gl.minimum(end_unmasked, last))  # the diagonal: key tiles from it on
        tiles = (last - 1, masked, begin)
        state, used = attend_tiles(state, q_tile, buffers, tiles, used, positions, factor, CONSUMER, CONFIG, True, True)
        unmasked = gl.minimum(gl.maximum(begin, first_unmasked), masked)
        tiles = (masked - 1, unmasked, begin)
        state, used = attend_tiles(state, q_tile, buffers, tiles, used, positions, factor, CONSUMER, CONFIG, False, False)
        if CONFIG.window is not None or CONFIG.has_mean:
            IN_WINDOW: gl.constexpr = CONFIG.window is not None
            tiles = (unmasked - 1, begin, begin)
            state, used = attend_tiles(state, q_tile, buffers, tiles, used, positions, factor, CONSUMER, CONFIG, IN_WINDOW, True)

        acc, weights, _, highest, total = state
        before = (used - 1) % V_STAGES
        mbarrier.wait(v_full.index(before), (used - 1) // V_STAGES & 1)
        acc = warpgroup_mma(weights, v.index(before), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(before), count=1)
        norm = 1.0 / total
        if value_scale_ptr is not None:
            norm = norm * gl.load(value_scale_ptr + kv_head)
        out = acc * gl.convert_layout(norm, gl.SliceLayout(1, output_layout(SIZE)))[:, None]
        element: gl.constexpr = out_ptr.dtype.element_ty
        staging = q_rows._reinterpret(element, [64, SIZE], swizzled_layout(SIZE))
        place = (token, num_queries, head_tile)
        store_result(out.to(element), out_ptr, staging, q_empty.index(stage), place, CONSUMER, CONFIG)
        received += 1
        stage = received % Q_STAGES
        mbarrier.wait(tile_full.index(stage), received // Q_STAGES & 1)
        end_tile = read_field(tile.index(stage * NUM_FIELDS))
