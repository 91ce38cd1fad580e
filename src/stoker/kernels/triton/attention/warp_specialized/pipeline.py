"""The shared memory of the warp-specialized prefill kernel: its buffers, its mbarriers, and what the warps tell each other.

    buffer      | stages      | content of a stage                                     | full: arrivals      | empty: arrivals
    q           | q_stages    | 2 × [64, size] queries, later the tile's results       | 128                 | 2 (one per consumer)
    tile        | q_stages    | `NUM_FIELDS` numbers of the query tile                 | 1                   | with q
    k           | K_STAGES    | [BLOCK_N, size] keys as the cache has them             | 1, with means 129   | 2
    means       | K_STAGES    | [size] the mean of keys, where it changes              | with k              | with k
    v           | V_STAGES    | [BLOCK_N, size] values of 16 bits                      | 1                   | 2
    raw         | raw_stages  | [BLOCK_N, size] values of an e4m3 cache                | 1                   | private to the producer

With an e4m3 cache, each consumer replaces its queries by e4m3 numbers in the same place (see `queries`).

Keys, values and raw values are copied in bulk: the arrival that expects their bytes is the only one. The producer copies queries and means
with `cp.async`, and arrives once per thread, when the copies of the thread are complete. Values that it stored itself, because it converted
or cleared them, have one arrival. With a 16-bit cache, values that are to be cleared complete the mbarrier of `raw` before. Matrices are in
the swizzle of 128 bytes that wgmma reads; e4m3 numbers of 64 features in that of 64 bytes.

With heads of 128, all stages take 225 of 227 KiB. One stage of queries and three of keys are slower (4 × 2,048 tokens: 474 instead of 495
TFLOP/s), because the next queries wait for the last results; so are three stages of keys and two of values (485), most of all over an e4m3
cache, whose values are converted (440 instead of 465).

Use `i` of a buffer with S stages is in stage i % S. A consumer waits for phase (i // S) & 1 of its full mbarrier, and the producer for
the phase before that one of its empty mbarrier; this is over at once for the first S uses.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from stoker.kernels.triton.ptx.gluon_names import reinterpret
from stoker.kernels.triton.ptx.registers import ptx

BLOCK_M = gl.constexpr(128)  # rows of a query tile: 64 of each consumer, the rows of a wgmma
BLOCK_N = gl.constexpr(128)  # keys per iteration
K_STAGES = gl.constexpr(2)
V_STAGES = gl.constexpr(3)
TERMS = gl.constexpr(2)  # e4m3 numbers whose sum is one query value, with an e4m3 cache
NUM_FIELDS = gl.constexpr(8)
FIRST_TURN = gl.constexpr(8)  # number of the named barrier of consumer 0; Triton uses the first ones


class PrefillConfig(NamedTuple):
    """Constants of a launch."""

    num_heads: int  # query heads
    group: int  # query heads per KV head (GQA)
    size: int  # features of a head: 64 or 128
    block_size: int  # tokens of a block of the cache
    heads: int  # query heads of a tile
    tokens: int  # tokens of a tile
    window: int | None  # a query sees itself and window - 1 keys before it
    has_mean: bool  # keys are stored less a mean, except for the first key of a sequence
    q_stages: int
    raw_stages: int  # 0: the cache has 16 bits, and nothing is converted
    key_bits: int  # of an element of the keys, and of the queries in shared memory: 16, or 8 with an e4m3 cache


@gluon.constexpr_function
def swizzled_layout(size, bits=16):
    """The layout of matrices in shared memory with rows of `size` elements of `bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, size * bits // 8), element_bitwidth=bits, rank=2)


@gluon.constexpr_function
def box_rows(block_size):
    """The rows of a bulk copy: those of one block, or of a key tile if that is less."""
    return min(BLOCK_N.value, block_size)


@gluon.constexpr_function
def box_columns(size, bits):
    """The columns of a bulk copy: at most 128 bytes, the width of a swizzled row."""
    return min(size, 1024 // bits)


@gluon.jit
def boxes_of(stages, COUNT: gl.constexpr, CONFIG: gl.constexpr):
    """`stages` [COUNT, BLOCK_N, size] as boxes [rows, columns] of bulk copies. In a stage, all boxes of the first columns come first."""
    ROWS: gl.constexpr = box_rows(CONFIG.block_size)
    COLUMNS: gl.constexpr = box_columns(CONFIG.size, stages.dtype.primitive_bitwidth)
    BOXES: gl.constexpr = COUNT * (BLOCK_N // ROWS) * (CONFIG.size // COLUMNS)
    return reinterpret(stages, stages.dtype, [BOXES, ROWS, COLUMNS], stages.layout)


@gluon.constexpr_function
def vector_layout(size, itemsize):
    """The layout of [rows, size] for 128 threads, each with 16 contiguous bytes."""
    vector = 16 // itemsize
    return gl.BlockedLayout([1, vector], [32 * vector // size, size // vector], [4, 1], [1, 0])


@gluon.constexpr_function
def field_layout():
    """The layout of one number of a tile: a copy in each lane."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def mbarriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """STAGES initialized mbarriers, each of which expects ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def write_field(fields, value):
    """Store the int32 scalar `value` as one number of a tile."""
    fields.store(gl.full([1], 0, gl.int32, field_layout()) + value)


@gluon.jit
def read_field(fields):
    """The int32 scalar that `write_field` stored."""
    return gl.max(fields.load(field_layout()), 0)


@gluon.jit
def wait_for_turn(CONSUMER: gl.constexpr):
    """Wait until the other consumer has issued its matrix products (`end_turn`)."""
    number = gl.full([128], FIRST_TURN + CONSUMER, gl.int32, field_layout())
    gl.inline_asm_elementwise(_WAIT_FOR_TURN, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_turn(CONSUMER: gl.constexpr):
    """Let the other consumer issue its matrix products."""
    number = gl.full([128], FIRST_TURN + 1 - CONSUMER, gl.int32, field_layout())
    gl.inline_asm_elementwise(_END_TURN, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


_WAIT_FOR_TURN = ptx(
    "bar.sync $1, 256;",  # 128 threads wait here, and 128 of the other consumer arrive
    "mov.b32 $0, $1;",
)

_END_TURN = ptx(
    "bar.arrive $1, 256;",
    "mov.b32 $0, $1;",
)
