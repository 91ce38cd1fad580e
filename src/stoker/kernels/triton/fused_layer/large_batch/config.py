"""Compile-time settings of the large-batch kernel, and the layout of a CTA's shared memory.

Shared memory of a CTA, in this order (`shared_offsets`):

    | pipelines: stages of warp 0 | … | of warp 15 | operand: B of each block of the CTA's slice (`ptx.wgmma`), 512 × tokens bytes each |
    | squares, float32 [512 threads] | mbarriers [3 linears, blocks of a slice] | schedule entries [linear, warp] | scale scratch [warp] |

A stage of one warp (`stage_bytes`): its 16 rows of one block (256 features), then the scales and zeros of these rows:

    | 16 rows × 128 bytes (`ptx.pipeline`) | 16-bit scales [groups, 16 rows] | zeros [groups, 16 rows], 8 bits ("int") or 16 ("float") |
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from stoker.kernels.triton.fused_layer.linear_args import unpack_numbers
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, groups_per_block
from stoker.kernels.triton.ptx.wgmma import operand_bytes

NUM_WARPS = tl.constexpr(16)
NUM_WARPGROUPS = tl.constexpr(4)  # of four warps each
NUM_THREADS = tl.constexpr(512)
TILE_ROWS = tl.constexpr(64)  # of a weight; of a gated one, 32 gates and the 32 rows that they gate
MAX_LINEARS = tl.constexpr(4)
SCHEDULE_ENTRY_BYTES = tl.constexpr(80)  # 64 are used; 80 so that threads which write neighbouring entries use different banks
PAIR_SCALE_BYTES = tl.constexpr(288)  # 8 bytes per row and group of a pair; 288 so that lanes which read two pairs use different banks


@dataclass(frozen=True)
class LargeBatchConfig:
    """The constants of a launch.

    Plain data: what is derived from it is a constexpr function, because Triton's cache keys contain the source of those. Not a named tuple,
    because Triton passes one to a constexpr function as a plain tuple.
    """

    gated: tuple[int, ...]  # per linear, 1 if its rows are gates followed by the rows that they gate
    has_bias: tuple[int, ...]  # per linear
    split_k: tuple[int, ...]  # per linear, the number of slices of its input features
    activation: str  # of the gates
    group_size: int  # features that share a scale: 32, 64, 128
    scale_dtype: str  # bfloat16, float16
    zero_kind: str  # none, int, float
    num_stages: int
    max_slice_blocks: int  # of a slice of any linear
    num_tokens: int  # a power of two from 8 to 64


@triton.constexpr_function
def make_config(
    gated,
    has_bias,
    split_k,
    activation,
    group_size,
    scale_dtype,
    zero_kind,
    num_stages,
    max_slice_blocks,
    num_tokens,
):
    """The LargeBatchConfig of the kernel's constexpr arguments. The first three are strings from `pack_numbers`. Constexpr."""
    return LargeBatchConfig(
        gated=unpack_numbers(gated),
        has_bias=unpack_numbers(has_bias),
        split_k=unpack_numbers(split_k),
        activation=activation,
        group_size=group_size,
        scale_dtype=scale_dtype,
        zero_kind=zero_kind,
        num_stages=num_stages,
        max_slice_blocks=max_slice_blocks,
        num_tokens=num_tokens,
    )


@triton.constexpr_function
def stage_bytes(group_size):
    """Size in bytes of one stage of one warp, in which zeros have at most the size of scales. Constexpr."""
    return BLOCK_BYTES.value + 64 * groups_per_block(group_size)


@triton.constexpr_function
def scale_scratch_bytes(group_size):
    """Bytes of shared memory in which the lanes of one warp share converted scales (`scales`); 0 for groups of 32. Constexpr."""
    return PAIR_SCALE_BYTES.value * groups_per_block(group_size) // 2 if group_size > 32 else 0


@triton.constexpr_function
def shared_offsets(num_stages, num_tokens, max_slice_blocks, group_size):
    """Offsets in bytes of the regions of shared memory: operand, squares, mbarriers, schedule, scale scratch, and the end. Constexpr."""
    operand = num_stages * NUM_WARPS.value * stage_bytes(group_size)
    squares = operand + max_slice_blocks * operand_bytes(num_tokens)
    mbarriers = squares + 4 * NUM_THREADS.value
    schedule = -(-(mbarriers + 3 * 8 * max_slice_blocks) // 16) * 16
    scale_scratch = schedule + (MAX_LINEARS.value + 1) * NUM_WARPS.value * SCHEDULE_ENTRY_BYTES.value
    end = scale_scratch + NUM_WARPS.value * scale_scratch_bytes(group_size)
    return (
        operand,
        squares,
        mbarriers,
        schedule,
        scale_scratch,
        -(-end // 1024) * 1024,
    )  # allocated as [n, 1024]: n need not be a power of two
