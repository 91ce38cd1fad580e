"""Norms of queries and keys, rotary position embedding (arXiv 2104.09864) and the write into the paged KV cache, in one launch.

With norms (`HeadNorms`), each head x of q and k first becomes x / sqrt(mean(x²) + eps) × weight, rounded to its dtype, which is the
result of `norm.norm` for q and k, without its two launches. For each token t and pair (a, b) of features that rotate together, with angle θ
of the token's position:

    a' = a cos θ - b sin θ        pairs: (0, half), (1, half + 1) ...     or, interleaved: (0, 1), (2, 3) ...
    b' = b cos θ + a sin θ

q [T, num_heads, size] is normalized and rotated in place. k [T, kv_heads, size], likewise, and v [T, kv_heads, value_size] are stored at
slot block × block_size + place of the cache (`kv_pages`): as they are, or in an 8-bit cache as round(x ÷ scale of the head).

With `key_balance`, heads are multiplied by factors per feature and go through a Hadamard transform (`hadamard`), after which no feature
stands out (QuaRot, arXiv 2404.00456); products of queries and keys stay the same. With `key_mean`, keys are stored less a mean.

Grid: axis 0 has the tokens, axis 1 tiles of HEADS heads: first those of q, then of k, then of v.

    tile    | q heads 0..7 | q heads 8..15 | ... | k heads 0..7 | v heads 0..7 |

Theoretical floor: reading q, k, v and writing as much, at the speed of memory. For few tokens the launch itself, about 1.2 µs.
With the write to a balanced FP8 cache, Llama-3.1-8B's 768 tokens take 12.3 µs on an H200 (floor 4.0), and 64 tokens 2.4.
"""

from __future__ import annotations

from functools import cache as cached
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.reference.rope import power_of_2_divisor
from stoker.kernels.triton.hadamard import hadamard_blocks
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.kv_pages import kv_pages, mean_tokens, require_dense_pages
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache
    from stoker.kernels.types import Rotary


class QKV(NamedTuple):
    """Runtime: the projections of T tokens, usually views of one fused tensor. Strides are in elements; the last axis is dense."""

    q_ptr: Tensor  # [T, num_heads, size]
    k_ptr: Tensor  # [T, kv_heads, size]
    v_ptr: Tensor  # [T, kv_heads, value_size]
    num_heads: int
    num_kv_heads: int
    stride_q_token: int
    stride_q_head: int
    stride_k_token: int
    stride_k_head: int
    stride_v_token: int
    stride_v_head: int
    q_norm_ptr: Tensor | None  # [size]: the weight of the norm of each head of q; None: no weight, or no norm
    k_norm_ptr: Tensor | None


class HeadFeatures(NamedTuple):
    """Constants: the features of a head. The first 2 × half rotate; the rest is copied, or transformed by itself."""

    size: int
    value_size: int  # 0: the cache has no values
    half: int
    interleaved: bool
    block_half: int  # half, rounded up to a power of two
    block_rest: int  # size - 2 × half, likewise
    block_value: int  # value_size, likewise
    hadamard_half: int  # the largest power of two that divides half: the block size of its Hadamard transform
    hadamard_rest: int  # of size - 2 × half
    norm_eps: float | None  # of the RMS norms of q and k; None: they have none


@triton.jit
def quantize(x, scale, DTYPE: tl.constexpr):
    """x ÷ scale rounded to the nearest value of int8 (ties to even) or float8_e4m3fn, clamped to its range.

    The quotient is a product with 1 ÷ scale, computed once per head, plus the product of its remainder, which rounds it as a division
    does: 5 instructions instead of 12 and a call for unusual exponents. The first clamp keeps the remainder finite.
    """
    x = x.to(tl.float32)
    inverse = 1.0 / scale
    units = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    units = tl.fma(tl.fma(units, -scale, x), inverse, units)
    if DTYPE == tl.int8:  # noqa: SIM300
        units = tl.minimum(tl.maximum(units, -127.0), 127.0)
        # Adding 1.5 × 2^23 leaves no fraction bits: the sum is rounded to an integer, to even on a tie.
        return ((units + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(units, -448.0), 448.0).to(DTYPE)


@triton.jit
def store_as_cache(target_ptr, offsets, x, scale, inside):
    """Store x in the dtype of the target: quantized by `scale` for an 8-bit cache, otherwise converted."""
    if target_ptr.dtype.element_ty.primitive_bitwidth == 8:
        tl.store(target_ptr + offsets, quantize(x, scale, target_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(target_ptr + offsets, x.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_scale(scale_ptr, heads, inside):
    """The scale of each head, or 1 without scales."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + heads, mask=inside, other=1.0)


@triton.jit
def load_pairs(source_ptr, offsets, inside, FEATURES: tl.constexpr):
    """(first, second), each float32 [heads, block_half]: the pairs of features that are rotated together.

    `offsets` and `inside` are [heads, 1].
    """
    HALF: tl.constexpr = FEATURES.half
    if FEATURES.interleaved:
        WIDTH: tl.constexpr = FEATURES.block_half
        cols = tl.arange(0, 2 * WIDTH)[None, :]
        x = tl.load(source_ptr + offsets + cols, mask=inside & (cols < 2 * HALF), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, (x.shape[0], WIDTH, 2)))
    else:
        pair = tl.arange(0, FEATURES.block_half)[None, :]
        first = tl.load(source_ptr + offsets + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        second = tl.load(source_ptr + offsets + HALF + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        return first, second


@triton.jit
def store_pairs(target_ptr, offsets, first, second, scale, inside, FEATURES: tl.constexpr):
    """The inverse of `load_pairs`: store the pairs in the dtype of the target, quantized by `scale` for an 8-bit cache."""
    HALF: tl.constexpr = FEATURES.half
    if FEATURES.interleaved:
        WIDTH: tl.constexpr = FEATURES.block_half
        cols = tl.arange(0, 2 * WIDTH)[None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], 2 * WIDTH))
        store_as_cache(target_ptr, offsets + cols, x, scale, inside & (cols < 2 * HALF))
    else:
        pair = tl.arange(0, FEATURES.block_half)[None, :]
        store_as_cache(target_ptr, offsets + pair, first, scale, inside & (pair < HALF))
        store_as_cache(target_ptr, offsets + HALF + pair, second, scale, inside & (pair < HALF))


@triton.jit
def load_features(source_ptr, offsets, inside, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """Load features BEGIN : END of several heads, as [heads, WIDTH] in the dtype of the source, with zeros from END on.

    `offsets` [heads, 1] is where each head begins. Heads outside of the mask `inside` [heads, 1] are zeros. For features that are not
    rotated, and for factors and means; `load_pairs` loads the rotated features.
    """
    cols = BEGIN + tl.arange(0, WIDTH)[None, :]
    return tl.load(source_ptr + offsets + cols, mask=inside & (cols < END), other=0.0)


@triton.jit
def store_features(target_ptr, offsets, x, scale, inside, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `load_features`: store x in the dtype of the target, quantized by `scale` for an 8-bit cache."""
    cols = BEGIN + tl.arange(0, WIDTH)[None, :]
    store_as_cache(target_ptr, offsets + cols, x, scale, inside & (cols < END))


@triton.jit
def normalized(x, factor, weight, DTYPE: tl.constexpr):
    """x × factor × weight (None: 1) in float32, rounded to the dtype of the heads as the result of a norm of its own is."""
    x = x * factor
    if weight is not None:
        x = x * weight
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_head(source_ptr, offsets, norm_ptr, inside, FEATURES: tl.constexpr):
    """(first, second, rest) of several heads, float32, after their norm if FEATURES has one.

    `first` and `second` are pairs of features (`load_pairs`), `rest` the features that are not rotated. A part without features is another
    name of one that has some. `norm_ptr` [size]: the weight of the norm, or None. `offsets` and `inside` are [heads, 1].
    """
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    REST: tl.constexpr = FEATURES.block_rest
    if HALF > 0:
        first, second = load_pairs(source_ptr, offsets, inside, FEATURES)
    if SIZE > 2 * HALF:
        rest = load_features(source_ptr, offsets, inside, 2 * HALF, SIZE, REST).to(tl.float32)
    if HALF == 0:
        first, second = rest, rest
    if SIZE == 2 * HALF:
        rest = first
    if FEATURES.norm_eps is not None:
        DTYPE: tl.constexpr = source_ptr.dtype.element_ty
        row = tl.full([1, 1], True, tl.int1)
        first_weight, second_weight, rest_weight = None, None, None
        if norm_ptr is not None:
            if HALF > 0:
                first_weight, second_weight = load_pairs(norm_ptr, tl.zeros([1, 1], tl.int32), row, FEATURES)
            if SIZE > 2 * HALF:
                rest_weight = load_features(norm_ptr, tl.zeros([1, 1], tl.int32), row, 2 * HALF, SIZE, REST).to(tl.float32)
        if HALF == 0:
            squares = tl.sum(rest * rest, axis=1)
        else:
            squares = tl.sum(first * first + second * second, axis=1)
            if SIZE > 2 * HALF:
                squares += tl.sum(rest * rest, axis=1)
        factor = (1.0 / tl.sqrt(squares / SIZE + FEATURES.norm_eps))[:, None]
        if HALF > 0:
            first, second = normalized(first, factor, first_weight, DTYPE), normalized(second, factor, second_weight, DTYPE)
        if SIZE > 2 * HALF:
            rest = normalized(rest, factor, rest_weight, DTYPE)
    return first, second, rest


@triton.jit
def load_angles(cos_sin_row_ptr, FEATURES: tl.constexpr):
    """(cosines, sines) of one token, each float32 [1, block_half]. `cos_sin_row_ptr` points to `half` cosines, then `half` sines."""
    pair = tl.arange(0, FEATURES.block_half)[None, :]
    cos = tl.load(cos_sin_row_ptr + pair, mask=pair < FEATURES.half, other=0.0)
    sin = tl.load(cos_sin_row_ptr + FEATURES.half + pair, mask=pair < FEATURES.half, other=0.0)
    return cos, sin


@triton.jit
def rotate_and_store(
    source_ptr,
    source_offsets,  # [heads, 1]
    target_ptr,
    target_offsets,  # [heads, 1]
    scale,  # the real value of a stored unit, [heads, 1] or 1
    norm_ptr,  # the weight of the norm, or None
    cos_sin_row_ptr,
    inside,  # [heads, 1]
    FEATURES: tl.constexpr,  # HeadFeatures
    IN_PLACE: tl.constexpr,  # source and target are the same
):
    """Load several heads, normalize them if FEATURES has a norm, rotate them, and store them divided by `scale`."""
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    DTYPE: tl.constexpr = source_ptr.dtype.element_ty
    if HALF > 0:
        cos, sin = load_angles(cos_sin_row_ptr, FEATURES)
    first, second, rest = load_head(source_ptr, source_offsets, norm_ptr, inside, FEATURES)
    if HALF > 0:
        turned = (first * cos - second * sin).to(DTYPE), (second * cos + first * sin).to(DTYPE)
        store_pairs(target_ptr, target_offsets, turned[0], turned[1], scale, inside, FEATURES)
    if SIZE > 2 * HALF and (not IN_PLACE or FEATURES.norm_eps is not None):
        store_features(target_ptr, target_offsets, rest.to(DTYPE), scale, inside, 2 * HALF, SIZE, FEATURES.block_rest)


@triton.jit
def transform_heads(
    source_ptr,
    source_offsets,  # [heads, 1]
    target_ptr,
    target_offsets,  # [heads, 1]
    scale,  # the real value of a stored unit, [heads, 1] or 1
    balance_ptr,  # factors [size] of each head, pointers [heads, 1]
    mean_ptr,  # means [size] of each head in units of the scale, pointers [heads, 1]; or None
    has_mean,  # [heads, 1]: whose mean is subtracted
    norm_ptr,  # the weight of the norm, or None
    cos_sin_row_ptr,
    inside,  # [heads, 1]
    FEATURES: tl.constexpr,  # HeadFeatures
):
    """`rotate_and_store` with another transform before the store, in which heads are multiplied by `balance_ptr` and lose their mean.

    The transform (`reference.rope.hadamard_transform`) applies a Hadamard transform to each of three vectors: the sums of all pairs, the
    differences of all pairs, and the features that are not rotated.
    """
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    REST: tl.constexpr = FEATURES.block_rest
    # All loads come before the first use of a value, so that the latency of memory is paid once.
    if HALF > 0:
        first_factor, second_factor = load_pairs(balance_ptr, 0, inside, FEATURES)
        if mean_ptr is not None:
            first_mean, second_mean = load_pairs(mean_ptr, 0, has_mean, FEATURES)
        cos, sin = load_angles(cos_sin_row_ptr, FEATURES)
    if SIZE > 2 * HALF:
        factor = load_features(balance_ptr, 0, inside, 2 * HALF, SIZE, REST)
        if mean_ptr is not None:
            rest_mean = load_features(mean_ptr, 0, has_mean, 2 * HALF, SIZE, REST)
    first, second, rest = load_head(source_ptr, source_offsets, norm_ptr, inside, FEATURES)
    if HALF > 0:
        first, second = first * cos - second * sin, second * cos + first * sin
        first, second = first * first_factor * 0.5**0.5, second * second_factor * 0.5**0.5
        plus, minus = hadamard_blocks(first + second, FEATURES.hadamard_half), hadamard_blocks(first - second, FEATURES.hadamard_half)
        if mean_ptr is not None:
            plus, minus = plus - first_mean * scale, minus - second_mean * scale
    if SIZE > 2 * HALF:
        rest = hadamard_blocks(rest * factor, FEATURES.hadamard_rest)
        if mean_ptr is not None:
            rest -= rest_mean * scale
    tl.debug_barrier()  # source and target may be the same: every thread has loaded its features
    if HALF > 0:
        store_pairs(target_ptr, target_offsets, plus, minus, scale, inside, FEATURES)
    if SIZE > 2 * HALF:
        store_features(target_ptr, target_offsets, rest, scale, inside, 2 * HALF, SIZE, REST)


@triton.jit(do_not_specialize=["q_tiles"])
def rope_store_kernel(
    # Groups of pointers, sizes and strides
    qkv,  # QKV
    cache,  # KVPages
    # Pointers
    key_balance_ptr,  # float32 [kv_heads, 2, size]: factors of keys, of queries; or None
    positions_ptr,  # int32 [T]
    cos_sin_ptr,  # float32 [max_positions, 2 × half]: cosines, then sines; or None
    slots_ptr,  # int32 [T]: block × block_size + place; -1 stores nowhere
    # Sizes
    q_tiles,  # tiles of q along axis 1; 0: q stays as it is
    kv_tiles,  # tiles of k, and of v
    # Constants
    FEATURES: tl.constexpr,  # HeadFeatures
    BLOCK_SIZE: tl.constexpr,  # tokens of a block
    HEADS: tl.constexpr,  # heads of a tile
    USE_PDL: tl.constexpr,
):
    """Rotate HEADS heads of q of one token in place, or store HEADS heads of its k, rotated, or v in the cache. The work of one CTA.

    With a norm in FEATURES, q and k are normalized before. With `key_balance_ptr`, they are also multiplied by its factors and transformed
    (`transform_heads`), and k is stored less its mean if the cache has means. Both let an 8-bit cache round keys less, and q · k stays the
    same.
    """
    SIZE: tl.constexpr = FEATURES.size
    HALF: tl.constexpr = FEATURES.half
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    cos_sin_row_ptr = cos_sin_ptr
    if HALF > 0:
        cos_sin_row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    lane = tl.arange(0, HEADS)[:, None]
    if tile < q_tiles:
        head = tile * HEADS + lane
        inside = head < qkv.num_heads
        offsets = token * qkv.stride_q_token + head * qkv.stride_q_head
        if key_balance_ptr is not None:
            kv_head = head // (qkv.num_heads // qkv.num_kv_heads)
            factors_ptr = key_balance_ptr + (kv_head * 2 + 1) * SIZE
            transform_heads(
                qkv.q_ptr, offsets, qkv.q_ptr, offsets, 1.0, factors_ptr, None, None, qkv.q_norm_ptr, cos_sin_row_ptr, inside, FEATURES
            )
        else:
            rotate_and_store(qkv.q_ptr, offsets, qkv.q_ptr, offsets, 1.0, qkv.q_norm_ptr, cos_sin_row_ptr, inside, FEATURES, True)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        block = slot // BLOCK_SIZE
        place = slot % BLOCK_SIZE
        head = (tile - q_tiles) % kv_tiles * HEADS + lane
        inside = (head < qkv.num_kv_heads) & (slot >= 0)
        if tile < q_tiles + kv_tiles:
            source = token * qkv.stride_k_token + head * qkv.stride_k_head
            target = block * cache.stride_key_block + head * cache.stride_key_head + place * SIZE
            scale = head_scale(cache.key_scale_ptr, head, inside)
            if key_balance_ptr is not None:
                mean_ptr = cache.key_mean_ptr
                has_mean = inside
                if cache.key_mean_ptr is not None:
                    position = tl.load(positions_ptr + token)
                    mean_ptr = cache.key_mean_ptr + head * cache.stride_mean_head + position // mean_tokens() * SIZE
                    has_mean = inside & (position > 0)
                factors_ptr = key_balance_ptr + head * (2 * SIZE)
                transform_heads(
                    qkv.k_ptr, source, cache.keys_ptr, target, scale, factors_ptr, mean_ptr, has_mean, qkv.k_norm_ptr, cos_sin_row_ptr,
                    inside, FEATURES,
                )  # fmt: skip
            else:
                rotate_and_store(qkv.k_ptr, source, cache.keys_ptr, target, scale, qkv.k_norm_ptr, cos_sin_row_ptr, inside, FEATURES, False)
        else:
            if cache.values_ptr is not None:
                source = token * qkv.stride_v_token + head * qkv.stride_v_head
                target = block * cache.stride_value_block + head * cache.stride_value_head + place * FEATURES.value_size
                scale = head_scale(cache.value_scale_ptr, head, inside)
                x = load_features(qkv.v_ptr, source, inside, 0, FEATURES.value_size, FEATURES.block_value)
                store_features(cache.values_ptr, target, x, scale, inside, 0, FEATURES.value_size, FEATURES.block_value)


def rope_store(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, slots: Tensor) -> Tensor:
    """Rotate q in place and store k and v (`ops.rope_store`). Raises ValueError for a cache that the kernel does not support."""
    positions, cos_sin, interleaved, norms = rotary
    tokens, num_heads, size = q.shape
    if tokens == 0:
        return q
    require_dense_pages(cache)
    if cache.key_mean is not None and cache.key_balance is None:
        raise ValueError("keys are stored less their mean in the coordinates of a key_balance, and the cache has none")
    kv_heads, half = k.shape[1], 0 if cos_sin is None else cos_sin.shape[1] // 2
    value_size = 0 if cache.values is None else cache.values.shape[-1]
    heads, num_warps = (4, 1) if cache.key_balance is not None else (8, 4) if tokens >= 64 else (4, 2)
    q_tiles = cdiv(num_heads, heads) if half or norms is not None or cache.key_balance is not None else 0
    kv_tiles = cdiv(kv_heads, heads)
    if cache.values is None:
        v = k
    q_norm, k_norm, eps = (None, None, None) if norms is None else norms
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    qkv = QKV(q, k, v, num_heads, kv_heads, *strides, q_norm, k_norm)
    rope_store_kernel[(tokens, q_tiles + kv_tiles * (1 if cache.values is None else 2))](
        qkv,
        kv_pages(cache),
        cache.key_balance,
        positions,
        cos_sin,
        slots,
        q_tiles,
        kv_tiles,
        FEATURES=_features(size, value_size, half, interleaved, eps),
        BLOCK_SIZE=cache.block_size,
        HEADS=heads,
        num_warps=num_warps,
        **pdl_launch_options(q),
    )
    return q


@triton.jit
def rotate_heads_kernel(
    x_ptr,  # [T, num_heads, size], dense in the last axis
    positions_ptr,  # int32 [T]
    cos_sin_ptr,  # float32 [max_positions, 2 × half]
    num_heads,
    stride_token,
    stride_head,
    FEATURES: tl.constexpr,  # HeadFeatures
    HEADS: tl.constexpr,  # heads of a CTA
    USE_PDL: tl.constexpr,
):
    """Rotate HEADS heads of one token in place. Grid: tokens × tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * FEATURES.half)
    offsets = token * stride_token + head * stride_head
    rotate_and_store(x_ptr, offsets, x_ptr, offsets, 1.0, None, row_ptr, head < num_heads, FEATURES, True)


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x in place and return it (`ops.rotate_heads`)."""
    tokens, heads, size = x.shape
    if tokens:
        rotate_heads_kernel[(tokens, cdiv(heads, 4))](
            x,
            positions,
            cos_sin,
            heads,
            x.stride(0),
            x.stride(1),
            FEATURES=_features(size, size, cos_sin.shape[1] // 2, interleaved),
            HEADS=4,
            num_warps=2,
            **pdl_launch_options(x),
        )
    return x


@cached
def _features(size: int, value_size: int, half: int, interleaved: bool, norm_eps: float | None = None) -> HeadFeatures:
    """The constants FEATURES: the sizes of a head's parts, rounded up to powers of two for tiles."""
    rest = size - 2 * half
    blocks = [next_power_of_2(max(n, 1)) for n in (half, rest, value_size)]
    return HeadFeatures(size, value_size, half, interleaved, *blocks, power_of_2_divisor(half), power_of_2_divisor(rest), norm_eps)
