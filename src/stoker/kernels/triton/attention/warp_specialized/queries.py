"""The queries of a consumer of the warp-specialized prefill kernel: 64 rows of a query tile, in shared memory.

The producer copies queries of 16 bits. e4m3 keys need queries of e4m3, of which the sum of TERMS = 2 is one query value. Each consumer
splits its own queries, and stores both terms where the 16-bit values were:

    q [64, size] of 16 bits    →    q [64 × TERMS, size] of e4m3: | the values, rounded | what the rounding left |

A consumer has the registers to hold all its queries, reduces rows within four lanes, and needs each value only once for the split and the
product with the mean of keys. The four warps of the producer would split 128 rows in parts of 16, and copy no keys in that time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from stoker.kernels.triton.attention.warp_specialized.pipeline import BLOCK_N, TERMS, swizzled_layout
from stoker.kernels.triton.kv_pages import mean_tokens


@gluon.constexpr_function
def scores_layout(key_bits):
    """The layout of scores [64, BLOCK_N] in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 256 // key_bits])


@gluon.constexpr_function
def query_layout(key_bits):
    """The layout of queries [64, size] as the left operand of the scores: each thread has the rows whose scores it has."""
    return gl.DotOperandLayout(0, scores_layout(key_bits), 32 // key_bits)


@gluon.constexpr_function
def mean_layout(key_bits):
    """The layout of a mean of keys [size] that queries are multiplied by."""
    return gl.SliceLayout(0, query_layout(key_bits))


@gluon.jit
def read_queries(q, CONFIG: gl.constexpr):
    """The queries q in shared memory [64, size], with e4m3 keys the sums of their terms, which float16 has exactly."""
    LAYOUT: gl.constexpr = query_layout(CONFIG.key_bits)
    if CONFIG.key_bits == 16:
        return q.load(LAYOUT)
    x = q.slice(0, 64).load(LAYOUT).to(gl.float16)
    for term in gl.static_range(1, TERMS):
        x += q.slice(64 * term, 64).load(LAYOUT).to(gl.float16)
    return x


@gluon.jit
def load_mean(mean_ptr, tile, CONFIG: gl.constexpr):
    """float32 [size]: the mean of the keys of `tile`. `mean_ptr`: the means of the KV head."""
    cols = gl.arange(0, CONFIG.size, mean_layout(CONFIG.key_bits))
    return gl.load(mean_ptr + tile * BLOCK_N // mean_tokens() * CONFIG.size + cols)


@gluon.jit
def mean_scores(x, mean, CONFIG: gl.constexpr):
    """float32 [64]: the products of queries x [64, size] with `mean` [size]."""
    return gl.convert_layout(gl.sum(x.to(gl.float32) * mean[None, :], 1), gl.SliceLayout(1, scores_layout(CONFIG.key_bits)))


@gluon.jit
def split_queries(q, mean, TYPE: gl.constexpr, CONFIG: gl.constexpr):
    """Replace the 16-bit queries q [64, size] by terms of TYPE. Returns (terms [64 × TERMS, size], unit, mean_score).

    `unit` [64]: the power of two by which a row of terms is multiplied. It makes the greatest magnitude of a row 128 to 256. Two terms are
    exact for bfloat16: the first one has four of the eight bits, and the rest is at most eight times the last bit. Only values below
    2 ** -9 of the greatest one are rounded, to 2 ** -18 of that. `mean_score` [64]: the products of the terms with `mean`, or zeros.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, scores_layout(CONFIG.key_bits))
    x = q.load(query_layout(CONFIG.key_bits)).to(gl.float32)
    exponent = gl.maximum(gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) & 0x7F800000, 16 << 23)
    x = x * ((254 << 23) - exponent + (7 << 23)).to(gl.float32, bitcast=True)[:, None]
    mean_score = gl.zeros([64], gl.float32, ROWS)
    if CONFIG.has_mean:
        mean_score = mean_scores(x, mean, CONFIG)
    terms = q._reinterpret(TYPE, [64 * TERMS, CONFIG.size], swizzled_layout(CONFIG.size, TYPE.primitive_bitwidth))
    for term in gl.static_range(TERMS):
        rounded = x.to(TYPE)
        terms.slice(64 * term, 64).store(rounded)
        x -= rounded.to(gl.float32)
    fence_async_shared()
    unit = gl.convert_layout((exponent - (7 << 23)).to(gl.float32, bitcast=True), ROWS)
    return terms, unit, mean_score
