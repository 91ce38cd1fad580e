"""Paged attention of prefill rows on Hopper: warp-specialized and persistent, after FlashAttention-3 (arXiv 2407.08608).

For query token t and query head h with KV head g = h // group, as in `prefill_kernel`:

    out[t, h] = Σ_j softmax_j(scale × q[t, h] · key[j, g]) × value[j, g]          j over the keys visible to t: causal, or in a window

Grid: one CTA per SM, which takes query tiles of 128 rows (tokens × heads of one KV head, see `query_tile`) until none is left.

    warps  0 – 3    consumer 0: rows 0 – 63 of each tile       232 registers
    warps  4 – 7    consumer 1: rows 64 – 127                  232 (224 with an 8-bit cache)
    warps  8 – 11   producer: tiles, queries, keys, values      40 (56)

Over an e4m3 cache, keys are multiplied as they are stored, with queries that are sums of two e4m3 numbers. Two products of 8 bits take the
tensor cores as long as one of 16 bits, and the producer converts values only. bfloat16 queries lose no precision (`queries.split_queries`).

Theoretical floor: as in `prefill_kernel`, 790 TFLOP/s. Reached on an H200 with 32 / 8 heads of 128, TFLOP/s of the causal half, and in
brackets what copies with `cp.async` reached on the same card: 1 × 8,192 tokens 600 (490), 4 × 2,048 tokens 508 (435), 8 × 1,024 tokens
423 (369). Over an e4m3 cache, keys less their means: 575 (513), 465 (416) and 348 (316). Without copies of keys and values, 631, 547 and
463 over 16 bits. The rest is what a query tile costs in addition to its key tiles, and power: other cards are up to 10 % faster.

Shared memory and mbarriers are described in `pipeline`, the copies in `producer`, the products and the softmax in `consumer`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.attention.warp_specialized.consumer import consume
from stoker.kernels.triton.attention.warp_specialized.pipeline import (
    BLOCK_N,
    K_STAGES,
    NUM_FIELDS,
    V_STAGES,
    field_layout,
    mbarriers,
    swizzled_layout,
)
from stoker.kernels.triton.attention.warp_specialized.producer import produce
from stoker.kernels.triton.ptx.sync import pdl_wait_and_launch_dependents


@gluon.jit
def consume_first(outputs, scale, queries, buffers, CONFIG: gl.constexpr):
    """Consumer 0."""
    consume(outputs, scale, queries, buffers, 0, CONFIG)


@gluon.jit
def consume_second(outputs, scale, queries, buffers, CONFIG: gl.constexpr):
    """Consumer 1."""
    consume(outputs, scale, queries, buffers, 1, CONFIG)


@gluon.jit(do_not_specialize=["first_row", "num_rows", "stride_block_table"])
def warp_specialized_prefill_kernel(
    # Pointers
    q_ptr,  # [tokens, num_heads, size]
    out_ptr,  # [tokens, num_heads, size], dense
    query_starts_ptr,  # int32 [num_rows + 1]
    seq_lens_ptr,  # int32 [num_rows]
    block_tables_ptr,  # int32 [num_rows, max_blocks]
    decode_count_ptr,  # int32 [1], replaces first_row, or None
    row_count_ptr,  # int32 [1], replaces num_rows, or None
    sinks_ptr,  # float32 [num_heads] or None
    counter_ptr,  # int32 [1], zero between launches: the next query tile
    cache,  # KVPages
    # TMA descriptors: all rows of the cache, copies of one block and 128 bytes of its rows
    k_desc,
    v_desc,
    # Sizes and strides
    scale,
    first_row,  # rows before it are decode rows, which have one token each
    num_rows,
    stride_q_token,
    stride_q_head,
    stride_block_table,
    # Constants
    CONFIG: gl.constexpr,  # PrefillConfig
    REGISTERS: gl.constexpr,  # of each thread of a consumer, and of the producer
    USE_PDL: gl.constexpr,
):
    """One CTA: attention of query tiles, which it takes from the counter."""
    SIZE: gl.constexpr = CONFIG.size
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    RAW_STAGES: gl.constexpr = CONFIG.raw_stages
    K_TYPE: gl.constexpr = k_desc.dtype
    V_TYPE: gl.constexpr = v_desc.dtype if RAW_STAGES == 0 else gl.float16
    K_ARRIVALS: gl.constexpr = 129 if CONFIG.has_mean else 1  # also of all threads of the producer: see `pipeline`
    pdl_wait_and_launch_dependents(gl.arange(0, 128, field_layout()), USE_PDL)
    q = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2 * Q_STAGES, 64, SIZE], swizzled_layout(SIZE))
    k = gl.allocate_shared_memory(K_TYPE, [K_STAGES, BLOCK_N, SIZE], swizzled_layout(SIZE, K_TYPE.primitive_bitwidth))
    v = gl.allocate_shared_memory(V_TYPE, [V_STAGES, BLOCK_N, SIZE], swizzled_layout(SIZE))
    raw = k  # not used
    means = k  # not used
    if CONFIG.has_mean:
        means = gl.allocate_shared_memory(gl.float32, [K_STAGES, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if RAW_STAGES > 0:
        raw = gl.allocate_shared_memory(v_desc.dtype, [RAW_STAGES, BLOCK_N, SIZE], swizzled_layout(SIZE, v_desc.dtype.primitive_bitwidth))
    tile = gl.allocate_shared_memory(gl.int32, [NUM_FIELDS * Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = mbarriers(Q_STAGES, 128)
    q_empty = mbarriers(Q_STAGES, 2)
    tile_full = mbarriers(Q_STAGES, 1)
    k_full = mbarriers(K_STAGES, K_ARRIVALS)
    k_empty = mbarriers(K_STAGES, 2)
    v_full = mbarriers(V_STAGES, 1)
    v_empty = mbarriers(V_STAGES, 2)
    raw_full = mbarriers(max(RAW_STAGES, 1), 1)

    outputs = (out_ptr, sinks_ptr, cache.key_scale_ptr, cache.value_scale_ptr, cache.key_mean_ptr, cache.stride_mean_head)
    queries = (q, tile, q_full, q_empty, tile_full)
    buffers = (k, v, means, k_full, k_empty, v_full, v_empty)
    sources = (k, v, raw, means, k_full, k_empty, v_full, v_empty, raw_full)
    sequences = (query_starts_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr, stride_block_table)
    q_rows = (q_ptr, stride_q_token, stride_q_head)
    heads = (cache.stride_key_head // SIZE, cache.stride_value_head // SIZE, cache.key_mean_ptr, cache.stride_mean_head)
    maps = (k_desc, v_desc, cache.stride_key_block // SIZE, cache.stride_value_block // SIZE)
    numbers = (first_row, num_rows, decode_count_ptr, row_count_ptr)
    gl.warp_specialize(
        [
            (consume_first, (outputs, scale, queries, buffers, CONFIG)),
            (consume_second, (outputs, scale, queries, buffers, CONFIG)),
            (produce, ((sequences, heads, q_rows), numbers, queries, sources, maps, CONFIG)),
        ],
        [4, 4],
        [REGISTERS[0], REGISTERS[1]],
    )
