"""Compile-time settings of the small-batch kernel, and the layout of a CTA's shared memory.

Shared memory of a CTA, in this order (`shared_offsets`):

    | pipelines: stages of warp 0 | stages of warp 1 | … | activations of each token | group sums of each token | partial results |

A stage of one warp (`stage_bytes`): blocks of 16 rows × 128 bytes of a weight (`ptx.pipeline`) and, of int4, their scales and zeros.

    | block 0 | block 1 | … | scales and zeros of block 0 | of block 1 | … |
                            | 16-bit scales [groups, 16 rows] | zeros [groups, 16 rows], 8 bits ("int") or 16 ("float") | pad to 128 |

Activations of one token (`activation_bytes`), as they are multiplied; K is the largest padded k of all linears:

    int8, int4 weights         | coarse digits, K bytes | 64 | fine digits, K bytes | 64 |     x ≈ step × (254 × coarse + fine)
    fp8 weights                | e4m3, K bytes | 64 |
    16-bit weights             | 2 × K bytes | 128 |

The padding lets lanes that read both digits, or several tokens, use different banks. Group sums: float32 [K / group_size] per token, of
int4 only, for the zeros. Partial results: float32 [token, warp, row], what each warp's features contribute to the CTA's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from stoker.kernels.triton.fused_layer.linear_args import unpack_numbers
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, groups_per_block

ALLOCATION_BYTES = 1024  # shared memory is allocated as [n, 1024]: n need not be a power of two


@dataclass(frozen=True)
class SmallBatchConfig:
    """The constants of a launch.

    Plain data: what is derived from it is a constexpr function, because Triton's cache keys contain the source of those. Not a named tuple,
    because Triton passes one to a constexpr function as a plain tuple.
    """

    gated: tuple[int, ...]  # per linear, 1 if its rows are gates followed by the rows that they gate
    has_bias: tuple[int, ...]  # per linear
    padded_k: tuple[int, ...]  # per linear, a power of two that covers k and all pipeline steps of a row
    activation: str  # of the gates
    format: str  # of the weights: bfloat16, float16, fp8, bytes (int8), int4
    group_size: int  # features that share a scale (int4), or 0
    scale_dtype: str  # of int4: bfloat16, float16
    zero_kind: str  # of int4: none, int, float
    num_stages: int
    num_warps: int
    blocks_per_stage: int
    max_rows: int  # of weights that a CTA has, at most
    num_tokens: int


@triton.constexpr_function
def make_config(
    gated,
    has_bias,
    padded_k,
    activation,
    weight_format,
    group_size,
    scale_dtype,
    zero_kind,
    num_stages,
    num_warps,
    blocks_per_stage,
    max_rows,
    num_tokens,
):
    """The SmallBatchConfig of the kernel's constexpr arguments. The first three are strings from `pack_numbers`. Constexpr."""
    return SmallBatchConfig(
        gated=unpack_numbers(gated),
        has_bias=unpack_numbers(has_bias),
        padded_k=unpack_numbers(padded_k),
        activation=activation,
        format=weight_format,
        group_size=group_size,
        scale_dtype=scale_dtype,
        zero_kind=zero_kind,
        num_stages=num_stages,
        num_warps=num_warps,
        blocks_per_stage=blocks_per_stage,
        max_rows=max_rows,
        num_tokens=num_tokens,
    )


@triton.constexpr_function
def scale_bytes(config):
    """Bytes of the scales and zeros of one block, 16 rows of each group, padded to whole 128-byte lines.

    Constexpr, as all functions here.
    """
    group_size = config.group_size
    scales = 32 * groups_per_block(group_size) if group_size else 0
    zeros = {"none": 0, "int": scales // 2, "float": scales}[config.zero_kind]
    return -(-(scales + zeros) // 128) * 128


@triton.constexpr_function
def stage_bytes(config):
    """Bytes of one stage of one warp."""
    return config.blocks_per_stage * (BLOCK_BYTES.value + scale_bytes(config))


@triton.constexpr_function
def digit_distance(config):
    """Bytes from the coarse digits of a token to its fine digits."""
    return max(config.padded_k) + 64


@triton.constexpr_function
def activation_bytes(config):
    """Bytes of the activations of one token."""
    return (1 if config.format == "fp8" else 2) * digit_distance(config)


@triton.constexpr_function
def group_sum_bytes(config):
    """Bytes of the group sums of one token. 16 bytes of padding let lanes of several tokens use different banks."""
    return 4 * max(config.padded_k) // config.group_size + 16 if config.group_size else 0


@triton.constexpr_function
def shared_offsets(config):
    """Offsets in bytes of the regions of shared memory: activations, group sums, partial results, and the end."""
    activations = config.num_stages * config.num_warps * stage_bytes(config)
    group_sums = activations + config.num_tokens * activation_bytes(config)
    partials = group_sums + config.num_tokens * group_sum_bytes(config)
    end = partials + 4 * config.num_tokens * config.num_warps * config.max_rows
    return activations, group_sums, partials, -(-end // 1024) * 1024


@triton.constexpr_function
def is_16bit(config):
    """Whether weights, and so the activations in shared memory, have 16 bits."""
    return config.format == "bfloat16" or config.format == "float16"


@triton.constexpr_function
def has_row_scales(config):
    """Whether each row of a weight has one scale."""
    return config.format == "fp8" or config.format == "bytes"


@triton.constexpr_function
def block_features(config):
    """Number of features in one row of a block, which has 128 bytes."""
    return 256 if config.format == "int4" else 64 if is_16bit(config) else 128
