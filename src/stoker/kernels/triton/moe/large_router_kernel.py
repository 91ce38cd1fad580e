"""The router of a mixture of experts for 65 to 1,024 tokens: norm, logits by matrix instructions, choice, and counts per expert.

    y = norm(x), logits = y × routerᵀ + bias, then the choice of `routing_kernels`; `place_choices_kernel` sorts the choices afterwards

    x, y bfloat16 [tokens, SIZE]; router float32 [experts, SIZE]; logits float32 [tokens, experts]
    slots int8 [tokens, experts]: i where an expert is the i-th one of a token, and -1 where it is not chosen
    counts int32 [tiles, experts]: choices of each expert among the TOKENS tokens of a tile

Grid: (splits of the experts, tiles of TOKENS tokens). A CTA normalizes its tokens once, keeps them in shared memory, and multiplies them
by its experts, eight at a time, which are copied to shared memory ahead. The CTA of a tile that finishes last chooses the experts of its
tokens. y is rounded to bfloat16 before the product, as a separate norm rounds it.

A float32 weight is the sum of three bfloat16 digits, w = high + middle + low, exactly unless it is nearly subnormal, and so the products
are those of float32. Infinite weights or tokens without a norm give NaN. Warps divide the features, because there are too few tokens and
experts for all of them. PART features of 16 warps:

    features     | 0 ... C-1 | C ... 2C-1 |  ...  | 15C ... 16C-1 |  next part
    warp         |     0     |     1      |  ...  |      15       |  0 ...             C = PART / 16
    sums         [16 slices, TOKENS, 8 experts], added at the end of the eight experts

A token's logits do not depend on the other tokens, nor on how experts are divided, so neither does its result.

Theoretical floor: 448 tokens of gpt-oss-20b (2,880 features, 32 experts) in 112 CTAs read 92 KB of x and 92 KB of the router each, 21 MB of
L2 in all: 3.8 µs at 5.5 TB/s. Measured with `place_choices_kernel`: 13.7 µs, and 39.4 for the separate launches. The first eight experts
of a CTA take 10 µs, of which most are latencies one after the other (x, norm, router, logits of the other CTAs), and eight more 3 to 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.moe.routing_kernels import choose_and_store_weights
from stoker.kernels.triton.norm import load_parameters
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
def row_statistics(xs, cols, eps, SIZE: tl.constexpr, PART: tl.constexpr, RMS: tl.constexpr):
    """(float32 [TOKENS] mean, or zeros with RMS; float32 [TOKENS] 1 / sqrt(mean((x - mean)²) + eps)) of the rows whose parts are `xs`."""
    mean = tl.zeros([xs[0].shape[1]], tl.float32)
    if not RMS:
        total = tl.zeros(xs[0].shape, tl.float32)
        for part in tl.static_range(len(xs)):
            total += xs[part].to(tl.float32)
        mean = tl.sum(tl.sum(total, 2), 0) / SIZE
    squares = tl.zeros(xs[0].shape, tl.float32)
    for part in tl.static_range(len(xs)):
        x = xs[part].to(tl.float32)
        if not RMS:
            x = tl.where(cols + part * PART < SIZE, x - mean[None, :, None], 0.0)
        squares += x * x
    return mean, 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 2), 0) / SIZE + eps)


@triton.jit
def normalize_part(x, mean, inverse, weight, bias, RMS: tl.constexpr):
    """float32 [SLICES, TOKENS, SLICE]: a part of the rows after the norm. mean, inverse [TOKENS]: see `row_statistics`."""
    x = x.to(tl.float32)
    if not RMS:
        x = x - mean[None, :, None]
    x = x * inverse[None, :, None] * weight
    if not RMS:
        x = x + bias
    return x


@triton.jit(do_not_specialize=["tokens", "chunks"])
def large_router_kernel(
    # Pointers
    x_ptr,  # bfloat16 [tokens, SIZE]
    norm_weight_ptr,  # [SIZE] or None
    norm_bias_ptr,  # [SIZE] or None
    y_ptr,  # bfloat16 [tokens, SIZE]; None: no norm
    router_ptr,  # float32 [experts, SIZE]
    bias_ptr,  # float32 [experts] or None
    logits_ptr,  # float32 [tokens, experts]
    finished_ptr,  # int32 [tiles]: CTAs of a tile that have stored their logits; zero between launches
    correction_ptr,  # see `choose_experts_kernel`
    weights_ptr,
    slots_ptr,  # int8 [tokens, experts]
    counts_ptr,  # int32 [tiles, experts]
    # Numbers
    tokens,
    chunks,  # of a CTA: its experts / CHUNK
    eps,  # of the norm
    scale,
    jitter,
    # Constants
    SIZE: tl.constexpr,
    RMS: tl.constexpr,  # the norm; False: layer norm
    TOKENS: tl.constexpr,  # of a CTA
    SLICES: tl.constexpr,  # of a part: one for each warp
    PART: tl.constexpr,  # features; a power of two
    CHUNK: tl.constexpr,  # experts that are multiplied at a time: 8, the width of a matrix instruction
    STAGES: tl.constexpr,  # of the pipeline that copies the router
    OPTIONS: tl.constexpr,  # RoutingOptions
    USE_PDL: tl.constexpr,
):
    """One CTA: the logits of TOKENS tokens and `chunks` × CHUNK experts. The last CTA of a tile chooses the experts of its tokens."""
    NUM_EXPERTS: tl.constexpr = OPTIONS.num_experts
    PARTS: tl.constexpr = (SIZE + PART - 1) // PART
    SLICE: tl.constexpr = PART // SLICES
    first = tl.program_id(0) * chunks * CHUNK
    tile = tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]  # [SLICES, 1, SLICE] of part 0
    norm_weights = ()
    norm_biases = ()
    for part in tl.static_range(PARTS):
        norm_weights += (load_parameters(norm_weight_ptr, cols + part * PART, SIZE, 1.0, True),)
        norm_biases += (load_parameters(norm_bias_ptr, cols + part * PART, SIZE, 0.0, True),)
    row = tl.minimum(token, tokens - 1)[None, :, None] * SIZE  # [1, TOKENS, 1]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    ys = ()  # [SLICES, TOKENS, SLICE] of each part
    for part in tl.static_range(PARTS):
        ys += (tl.load(x_ptr + row + cols + part * PART, mask=cols + part * PART < SIZE, other=0.0),)
    if y_ptr is not None:
        xs = ys
        ys = ()
        mean, inverse = row_statistics(xs, cols, eps, SIZE, PART, RMS)
        is_stored = (token % tl.num_programs(0) == tl.program_id(0)) & (token < tokens)
        for part in tl.static_range(PARTS):
            y = normalize_part(xs[part], mean, inverse, norm_weights[part], norm_biases[part], RMS).to(y_ptr.dtype.element_ty)
            inside = cols + part * PART < SIZE
            tl.store(y_ptr + row + cols + part * PART, y, mask=is_stored[None, :, None] & inside)
            ys += (y,)
    for chunk in tl.range(0, tl.minimum(chunks, tl.cdiv(NUM_EXPERTS - first, CHUNK)), num_stages=STAGES):
        expert = first + chunk * CHUNK + tl.arange(0, CHUNK)
        router_row = tl.minimum(expert, NUM_EXPERTS - 1)
        sums = tl.zeros([SLICES, TOKENS, CHUNK], tl.float32)
        for part in tl.static_range(PARTS):
            inside = cols + part * PART < SIZE
            w = tl.load(router_ptr + router_row[None, :, None] * SIZE + cols + part * PART, mask=inside, other=0.0)
            high, middle, low = bfloat16_digits(w)  # [SLICES, CHUNK, SLICE]
            sums = tl.dot(ys[part], tl.permute(low, (0, 2, 1)), sums)
            sums = tl.dot(ys[part], tl.permute(middle, (0, 2, 1)), sums)
            sums = tl.dot(ys[part], tl.permute(high, (0, 2, 1)), sums)
        logits = tl.sum(sums, 0)  # [TOKENS, CHUNK]
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + router_row)[None, :]
        stored = (token < tokens)[:, None] & (expert < NUM_EXPERTS)[None, :]
        tl.store(logits_ptr + token[:, None] * NUM_EXPERTS + expert[None, :], logits, mask=stored)
    tl.debug_barrier()  # orders the stores of all threads before the atomic of one, and before the loads below
    finished = 0
    if tl.num_programs(0) > 1:
        finished = tl.atomic_add(finished_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(finished_ptr + tile, 0)
        # A token for each warp, so that no reduction over its experts crosses warps. Other tiles' logits may not be stored yet.
        place = tl.arange(0, TOKENS if TOKENS > SLICES else SLICES)
        chosen_token = tile * TOKENS + place % TOKENS
        is_token = (place < TOKENS) & (chosen_token < tokens)
        _, slots, expert_index, is_expert = choose_and_store_weights(
            logits_ptr, correction_ptr, weights_ptr, chosen_token, is_token, tokens, scale, jitter, OPTIONS
        )
        is_score = is_token[:, None, None] & is_expert
        tl.store(slots_ptr + chosen_token[:, None, None] * NUM_EXPERTS + expert_index, slots.to(tl.int8), mask=is_score)
        count = tl.sum((is_score & (slots >= 0)).to(tl.int32), 0)[None, :, :]
        tl.store(counts_ptr + tile * NUM_EXPERTS + expert_index, count, mask=is_expert)
