"""The product of a router for 17 tokens and more, by matrix instructions, in slices of the features.

    logits[slice] = y[:, slice] × router[:, slice]ᵀ (+ bias in slice 0); `choose_experts_kernel` adds the slices

    y bfloat16 [tokens, SIZE], after the norm; router float32 [experts, SIZE]; logits float32 [slices, tokens, experts]

Grid: (slices of SLICE features, tiles of TOKENS tokens, tiles of EXPERTS experts). Nothing is exchanged between CTAs, and nothing is
loaded in a loop: each CTA reads one tile of both operands and multiplies it once. The sums of a token depend on the slices only, which
have one size, so that its logits have the same bits in every batch.

    CTA   router [EXPERTS, SLICE] -> registers | wait | y [TOKENS, SLICE], three digits -> shared memory | 3 products | sums -> logits

The router does not depend on earlier kernels. It is loaded before the wait, while the norm still runs.

A float32 weight is the sum of three bfloat16 digits, w = high + middle + low, exactly unless it is nearly subnormal, and so the products
are those of float32. Infinite weights or tokens without a norm give NaN.

Theoretical floor: 448 tokens of Qwen3-30B-A3B (2,048 features, 128 experts) are 0.7 GFLOP, 0.7 µs, and read 14 MB from L2 in 224 CTAs, 2.6
µs at 5.5 TB/s. Measured on an H200 in a chain of norm, product, choice and sort (benchmarks/results/h200_router_slices.json): 4 to 5 of
10.5 µs per layer. The library's product in float32 with its conversion took 18 of 29.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def upper_half(w):
    """bfloat16: the upper 16 bits of float32 w."""
    return (w.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def bfloat16_digits(w):
    """(high, middle, low): bfloat16 tensors whose sum is w, float32. Each has the first eight bits of what the ones before have left.

    Bits are cut off, not rounded: the assembler converts digits that are subtracted again one by one (F2F), at half of the rate or less.
    """
    middle_low = w - (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    low = middle_low - (middle_low.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return upper_half(w), upper_half(middle_low), upper_half(low)


@triton.jit
def products(y, w):
    """y × wᵀ, float32 [TOKENS, EXPERTS]. y bfloat16 [TOKENS, SLICE], w float32 [EXPERTS, SLICE].

    Three products that do not add to each other: Triton gives a chain of products a layout in which eight warps compute each sum twice. It
    makes a chain of `product + sum`, too, but not of `fma`.
    """
    high, middle, low = bfloat16_digits(w)
    return tl.fma(tl.dot(y, tl.trans(low)), 1.0, tl.fma(tl.dot(y, tl.trans(middle)), 1.0, tl.dot(y, tl.trans(high))))


@triton.jit(do_not_specialize=["tokens"])
def router_product_kernel(
    # Pointers
    y_ptr,  # bfloat16 [tokens, SIZE]
    router_ptr,  # float32 [NUM_EXPERTS, SIZE]
    bias_ptr,  # float32 [NUM_EXPERTS] or None
    logits_ptr,  # float32 [slices, tokens, NUM_EXPERTS]
    # Sizes
    tokens,
    # Constants
    SIZE: tl.constexpr,  # features
    NUM_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a CTA
    EXPERTS: tl.constexpr,  # of a CTA
    SLICE: tl.constexpr,  # features of a CTA
    USE_PDL: tl.constexpr,
):
    """One CTA: the sums of TOKENS tokens and EXPERTS experts over one slice of the features. Those of slice 0 contain the bias."""
    feature_slice = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(2) * EXPERTS + tl.arange(0, EXPERTS)
    cols = feature_slice * SLICE + tl.arange(0, SLICE)[None, :]
    router_row = tl.minimum(expert, NUM_EXPERTS - 1)
    w = tl.load(router_ptr + router_row[:, None] * SIZE + cols, mask=cols < SIZE, other=0.0, volatile=True)  # [EXPERTS, SLICE]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * SIZE
    y = tl.load(y_ptr + row + cols, mask=cols < SIZE, other=0.0)  # [TOKENS, SLICE]
    sums = products(y, w)
    if bias_ptr is not None and feature_slice == 0:
        sums += tl.load(bias_ptr + router_row)[None, :]
    place = (feature_slice.to(tl.int64) * tokens + token[:, None]) * NUM_EXPERTS + expert[None, :]
    tl.store(logits_ptr + place, sums, mask=(token < tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])
