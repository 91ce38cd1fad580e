"""Compile-time settings of the small-batch kernel, and the layout of a CTA's shared memory.

Shared memory of a CTA, in this order (`shared_offsets`):

    | pipelines: stages of warp 0 | stages of warp 1 | … | activations of each token | group sums of each token | partial results |

A stage of one warp (`stage_bytes`): blocks of 16 rows × 128 bytes of a weight (`ptx.pipeline`) and, of int4, their scales and zeros.

    | block 0 | block 1 | … | scales and zeros of block 0 | of block 1 | … |
                            | 16-bit scales [groups, 16 rows] | zeros [groups, 16 rows], 8 bits ("int") or 16 ("float") | pad to 128 |

Activations of one token (`activation_bytes`), as they are multiplied; K is the number of the linear's features, rounded up to a power of
two, because a CTA processes a token at once:

    int8, int4 weights         | coarse digits, K bytes | 64 | fine digits, K bytes | 64 |     x ≈ step × (254 × coarse + fine)
    fp8 weights                | e4m3, K bytes | 64 |
    16-bit weights             | 2 × features bytes | 64 |

The padding lets lanes that read both digits, or several tokens, use different banks. With 16 bits it also takes what is stored beyond the
features, so that more tokens fit. Group sums: float32 [K / group_size] per token, of int4 only, for the zeros. Partial results: float32
[token, warp, row], what each warp's features contribute to the CTA's rows. Each linear has its own offsets: down has the most features,
and gate_up the most rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from stoker.kernels.triton.fused_layer.linear_args import unpack_numbers
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, groups_per_block

ALLOCATION_BYTES = 1024  # shared memory is allocated as [n, 1024]: n need not be a power of two
MIN_SHARED_BYTES = triton.language.constexpr(115 << 10)  # more than half of the 228 KiB of an SM on sm_90
PADDING = triton.language.constexpr(64)  # bytes after the activations or digits of a token


@dataclass(frozen=True)
class SmallBatchConfig:
    """The constants of a launch.

    Plain data: what is derived from it is a constexpr function, because Triton's cache keys contain the source of those. Not a named tuple,
    because Triton passes one to a constexpr function as a plain tuple.
    """

    gated: tuple[int, ...]  # per linear, 1 if its rows are gates followed by the rows that they gate
    has_bias: tuple[int, ...]  # per linear
    features: tuple[int, ...]  # per linear, of all pipeline steps of a row: k rounded up
    activation: str  # of the gates
    format: str  # of the weights: bfloat16, float16, fp8, bytes (int8), int4
    group_size: int  # features that share a scale (int4), or 0
    scale_dtype: str  # of int4: bfloat16, float16
    zero_kind: str  # of int4: none, int, float
    num_stages: int
    num_warps: int
    blocks_per_stage: int
    max_rows: tuple[int, ...]  # per linear, of the weight that a CTA has, at most
    num_tokens: int


@triton.constexpr_function
def make_config(
    gated,
    has_bias,
    features,
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
        features=unpack_numbers(features),
        activation=activation,
        format=weight_format,
        group_size=group_size,
        scale_dtype=scale_dtype,
        zero_kind=zero_kind,
        num_stages=num_stages,
        num_warps=num_warps,
        blocks_per_stage=blocks_per_stage,
        max_rows=unpack_numbers(max_rows),
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
def padded_width(config, index):
    """The features that a CTA loads of a token's input of linear `index`: a power of two that covers `features`."""
    return 1 << (config.features[index] - 1).bit_length()


@triton.constexpr_function
def has_digits(config):
    """Whether activations are two int8 digits."""
    return config.format == "bytes" or config.format == "int4"


@triton.constexpr_function
def columns_per_token(config):
    """Columns of the matrix instruction that hold one token: two for two digits, and for few tokens (see `products`)."""
    return 2 if has_digits(config) or config.num_tokens <= 4 else 1


@triton.constexpr_function
def digit_distance(config, index):
    """Bytes from the coarse digits of a token to its fine digits."""
    return padded_width(config, index) + PADDING.value


@triton.constexpr_function
def activation_bytes(config, index):
    """Bytes of the activations of one token."""
    if is_16bit(config):
        return 2 * config.features[index] + PADDING.value
    return (2 if has_digits(config) else 1) * (padded_width(config, index) + PADDING.value)


@triton.constexpr_function
def group_sum_bytes(config, index):
    """Bytes of the group sums of one token. 16 bytes of padding let lanes of several tokens use different banks."""
    return 4 * padded_width(config, index) // config.group_size + 16 if config.group_size else 0


@triton.constexpr_function
def shared_offsets(config, index):
    """Offsets in bytes of the regions of shared memory for linear `index`: activations, group sums, partial results, and the end."""
    activations = config.num_stages * config.num_warps * stage_bytes(config)
    group_sums = activations + config.num_tokens * activation_bytes(config, index)
    partials = group_sums + config.num_tokens * group_sum_bytes(config, index)
    end = partials + 4 * config.num_tokens * config.num_warps * config.max_rows[index]
    return activations, group_sums, partials, -(-end // 1024) * 1024


@triton.constexpr_function
def needed_bytes(config):
    """Bytes of shared memory that all linears need, a multiple of ALLOCATION_BYTES."""
    return max(shared_offsets(config, index)[3] for index in range(len(config.features)))


@triton.constexpr_function
def shared_bytes(config):
    """Bytes of shared memory that a CTA allocates: at least MIN_SHARED_BYTES.

    With less an SM could get two CTAs, while attention still runs on others: a step of AWQ with one row took 2.05 ms instead of 1.94.
    """
    return max(MIN_SHARED_BYTES.value, needed_bytes(config))


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
