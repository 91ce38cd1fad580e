"""Rotary positions (arXiv 2104.09864) and the write into the paged cache, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.reference.rope import twos
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import MEAN_TOKENS

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


@triton.constexpr_function
def mean_tokens():
    return MEAN_TOKENS


@triton.jit
def quantized(x, scale, DTYPE: tl.constexpr):
    """x ÷ scale rounded to the nearest value of int8 (ties to even) or float8_e4m3fn, clamped to its range."""
    units = tl.div_rn(x.to(tl.float32), scale)
    if DTYPE == tl.int8:  # noqa: SIM300
        units = tl.minimum(tl.maximum(units, -127.0), 127.0)
        # Adding 1.5 × 2^23 leaves no fraction bits: the sum is rounded to an integer, to even on a tie.
        return ((units + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(units, -448.0), 448.0).to(DTYPE)


@triton.jit
def write(target, offsets, x, scale, inside):
    """Store x in the target's dtype: in units of `scale` in an 8-bit cache, as it is elsewhere."""
    if target.dtype.element_ty.primitive_bitwidth == 8:
        tl.store(target + offsets, quantized(x, scale, target.dtype.element_ty), mask=inside)
    else:
        tl.store(target + offsets, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def head_scale(scales, heads, known):
    """Each head's scale, 1 without scales."""
    if scales is None:
        return 1.0
    else:
        return tl.load(scales + heads, mask=known, other=1.0)


@triton.jit
def rotation(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_pairs(source, offsets, inside, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both features [heads, BLOCK_HALF] of the first HALF pairs of some heads, float32. Offsets and masks are [heads, 1]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.load(source + offsets + cols, mask=inside & (cols < 2 * HALF), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, (x.shape[0], BLOCK_HALF, 2)))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        first = tl.load(source + offsets + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        second = tl.load(source + offsets + HALF + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        return first, second


@triton.jit
def write_pairs(target, offsets, first, second, scale, inside, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other way round."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK_HALF))
        write(target, offsets + cols, x, scale, inside & (cols < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        write(target, offsets + pair, first, scale, inside & (pair < HALF))
        write(target, offsets + HALF + pair, second, scale, inside & (pair < HALF))


@triton.jit
def rotated_pairs(source, offsets, angles, inside, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """`load_pairs`, rotated."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(angles + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=pair < HALF, other=0.0)
    first, second = load_pairs(source, offsets, inside, HALF, BLOCK_HALF, INTERLEAVED)
    return rotation(first, second, cos, sin)


@triton.jit
def rotate_heads(
    source, source_offsets, target, target_offsets, scale, angles, inside,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 × HALF features of some heads from `source` to `target`."""
    dtype: tl.constexpr = source.dtype.element_ty
    first, second = rotated_pairs(source, source_offsets, angles, inside, HALF, BLOCK_HALF, INTERLEAVED)
    write_pairs(target, target_offsets, first.to(dtype), second.to(dtype), scale, inside, HALF, BLOCK_HALF, INTERLEAVED)


@triton.jit
def load_part(source, offsets, inside, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Features BEGIN : END [heads, BLOCK] of some heads."""
    cols = BEGIN + tl.arange(0, BLOCK)[None, :]
    return tl.load(source + offsets + cols, mask=inside & (cols < END), other=0.0)


@triton.jit
def write_part(target, offsets, x, scale, inside, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """The other way round."""
    cols = BEGIN + tl.arange(0, BLOCK)[None, :]
    write(target, offsets + cols, x, scale, inside & (cols < END))


@triton.jit
def copy_heads(source, source_offsets, target, target_offsets, scale, inside, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Write features BEGIN : END of some heads as they are."""
    write_part(target, target_offsets, load_part(source, source_offsets, inside, BEGIN, END, BLOCK), scale, inside, BEGIN, END, BLOCK)


@triton.jit
def butterflies(x, SIZE: tl.constexpr):
    """x [n, SIZE], of at most eight columns, times Sylvester's matrix: sums and differences of neighbours, which one thread holds."""
    if SIZE == 1:
        return x
    else:
        first, second = tl.split(tl.reshape(x, (x.shape[0], SIZE // 2, 2)))
        plus, minus = butterflies(first + second, SIZE // 2), butterflies(first - second, SIZE // 2)
        return tl.reshape(tl.join(plus, minus), (x.shape[0], SIZE))


@triton.jit
def sylvester(x, SIZE: tl.constexpr):
    """x [n, SIZE] times Sylvester's matrix, eight columns at a time."""
    if SIZE <= 8:
        return butterflies(x, SIZE)
    else:
        rows: tl.constexpr = x.shape[0]
        wide = tl.permute(tl.reshape(x, (rows, 8, SIZE // 8)), (0, 2, 1))
        wide = tl.reshape(butterflies(tl.reshape(wide, (rows * SIZE // 8, 8)), 8), (rows, SIZE // 8, 8))
        wide = tl.reshape(tl.permute(wide, (0, 2, 1)), (rows * 8, SIZE // 8))
        return tl.reshape(sylvester(wide, SIZE // 8), (rows, SIZE))


@triton.jit
def hadamard(x, SIZE: tl.constexpr):
    """Rows of x [heads, n] in blocks of SIZE features, each times Sylvester's orthonormal matrix.

    Where a thread holds eight of a head, sums and differences need no other thread (one token of 32 / 8 heads of 128: 2,902 lines of
    PTX with 12 barriers, of one warp; by sums over products with signs, in two warps, 4,559 with 44).
    """
    blocks = tl.reshape(x, (x.shape[0] * x.shape[1] // SIZE, SIZE))
    return tl.reshape(sylvester(blocks, SIZE), x.shape) * (1.0 / SIZE**0.5)


@triton.jit
def spread_heads(
    source, source_offsets, target, target_offsets, scale, balance, mean, has_mean, angles, inside,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    MIX_HALF: tl.constexpr, MIX_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate, balance and spread some heads from `source` to `target`, those that `has_mean` less their mean, in units of `scale`.

    `balance` and `mean` (or None): where their factors and means are, [heads, 1].
    """
    # All that is read is asked for before any of it is used: memory is waited for once.
    if HALF > 0:
        first_factor, second_factor = load_pairs(balance, 0, inside, HALF, BLOCK_HALF, INTERLEAVED)
        if mean is not None:
            first_mean, second_mean = load_pairs(mean, 0, has_mean, HALF, BLOCK_HALF, INTERLEAVED)
    if SIZE > 2 * HALF:
        factor = load_part(balance, 0, inside, 2 * HALF, SIZE, BLOCK_REST)
        rest = load_part(source, source_offsets, inside, 2 * HALF, SIZE, BLOCK_REST)
        if mean is not None:
            rest_mean = load_part(mean, 0, has_mean, 2 * HALF, SIZE, BLOCK_REST)
    if HALF > 0:
        first, second = rotated_pairs(source, source_offsets, angles, inside, HALF, BLOCK_HALF, INTERLEAVED)
        first, second = first * first_factor * 0.5**0.5, second * second_factor * 0.5**0.5
        plus, minus = hadamard(first + second, MIX_HALF), hadamard(first - second, MIX_HALF)
        if mean is not None:
            plus, minus = plus - first_mean * scale, minus - second_mean * scale
    if SIZE > 2 * HALF:
        rest = hadamard(rest.to(tl.float32) * factor, MIX_REST)
        if mean is not None:
            rest -= rest_mean * scale
    tl.debug_barrier()  # source and target may be the same: every feature was read
    if HALF > 0:
        write_pairs(target, target_offsets, plus, minus, scale, inside, HALF, BLOCK_HALF, INTERLEAVED)
    if SIZE > 2 * HALF:
        write_part(target, target_offsets, rest, scale, inside, 2 * HALF, SIZE, BLOCK_REST)


@triton.jit(do_not_specialize=["q_tiles"])
def rope_store_kernel(
    q, k, v, positions, cos_sin, slots, key_cache, value_cache, key_scale, value_scale, key_balance, key_mean,
    num_heads, num_kv_heads, q_tiles, kv_tiles, stride_mean_head,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_key_block, stride_key_head, stride_value_block, stride_value_head,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    MIX_HALF: tl.constexpr, MIX_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of one token. Along axis 1 come the tiles of q (rotated in place), then of k, then of v (stored)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    angles = cos_sin
    if HALF > 0:
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    lane = tl.arange(0, HEADS)[:, None]
    if tile < q_tiles:
        q_head = tile * HEADS + lane
        q_known = q_head < num_heads
        place = token * stride_q_token + q_head * stride_q_head
        if key_balance is not None:
            factors = key_balance + (q_head // (num_heads // num_kv_heads) * 2 + 1) * SIZE
            spread_heads(
                q, place, q, place, 1.0, factors, None, None, angles, q_known,
                SIZE, HALF, BLOCK_HALF, BLOCK_REST, MIX_HALF, MIX_REST, INTERLEAVED,
            )  # fmt: skip
        elif HALF > 0:
            rotate_heads(q, place, q, place, 1.0, angles, q_known, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        block = slot // BLOCK_SIZE
        row = slot % BLOCK_SIZE
        head = (tile - q_tiles) % kv_tiles * HEADS + lane
        known = (head < num_kv_heads) & (slot >= 0)
        if tile < q_tiles + kv_tiles:
            source = token * stride_k_token + head * stride_k_head
            target = block * stride_key_block + head * stride_key_head + row * SIZE
            key_unit = head_scale(key_scale, head, known)
            if key_balance is not None:
                mean = key_mean
                has_mean = known
                if key_mean is not None:
                    position = tl.load(positions + token)
                    mean = key_mean + head * stride_mean_head + position // mean_tokens() * SIZE
                    has_mean = known & (position > 0)
                spread_heads(
                    k, source, key_cache, target, key_unit, key_balance + head * (2 * SIZE), mean, has_mean, angles, known,
                    SIZE, HALF, BLOCK_HALF, BLOCK_REST, MIX_HALF, MIX_REST, INTERLEAVED,
                )  # fmt: skip
            else:
                if HALF > 0:
                    rotate_heads(k, source, key_cache, target, key_unit, angles, known, HALF, BLOCK_HALF, INTERLEAVED)
                if SIZE > 2 * HALF:
                    copy_heads(k, source, key_cache, target, key_unit, known, 2 * HALF, SIZE, BLOCK_REST)
        else:
            if value_cache is not None:
                value_source = token * stride_v_token + head * stride_v_head
                value_target = block * stride_value_block + head * stride_value_head + row * VALUE_SIZE
                copy_heads(
                    v, value_source, value_cache, value_target, head_scale(value_scale, head, known), known, 0, VALUE_SIZE, BLOCK_VALUE
                )


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor | None, interleaved: bool, cache: KVCache, slots: Tensor
) -> Tensor:
    """See `ops.rope_store`. q is rotated, and spread, in place."""
    tokens, num_heads, _ = q.shape
    if tokens == 0:
        return q
    require_dense_pages(cache)
    if cache.key_mean is not None and cache.key_balance is None:
        raise ValueError("keys are stored less their mean in the coordinates of a key_balance, and the cache has none")
    kv_heads, half = k.shape[1], 0 if cos_sin is None else cos_sin.shape[1] // 2
    value_size = 0 if cache.values is None else cache.values.shape[-1]
    heads, num_warps = (4, 1) if cache.key_balance is not None else (8, 4) if tokens >= 64 else (4, 2)
    q_tiles = triton.cdiv(num_heads, heads) if half or cache.key_balance is not None else 0
    kv_tiles = triton.cdiv(kv_heads, heads)
    v, values = (k, cache.keys) if cache.values is None else (v, cache.values)
    rope_store_kernel[(tokens, q_tiles + kv_tiles * (1 if cache.values is None else 2))](
        q, k, v, positions, cos_sin, slots, cache.keys, cache.values, cache.key_scale, cache.value_scale, cache.key_balance, cache.key_mean,
        num_heads, kv_heads, q_tiles, kv_tiles, 0 if cache.key_mean is None else cache.key_mean.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache.keys.stride(0), cache.keys.stride(1), values.stride(0), values.stride(1),
        SIZE=k.shape[2], VALUE_SIZE=value_size, HALF=half, BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_REST=triton.next_power_of_2(max(k.shape[2] - 2 * half, 1)), BLOCK_VALUE=triton.next_power_of_2(max(value_size, 1)),
        MIX_HALF=twos(half), MIX_REST=twos(k.shape[2] - 2 * half), INTERLEAVED=interleaved, BLOCK_SIZE=cache.block_size, HEADS=heads,
        num_warps=num_warps, **pdl_launch_options(q),
    )  # fmt: skip
    return q


def require_dense_pages(cache: KVCache) -> None:
    """The kernels address one head's page as block_size × head_size dense values."""
    for name, pages in (("keys", cache.keys), ("values", cache.values)):
        if pages is not None and pages.stride()[2:] != (pages.shape[3], 1):
            raise ValueError(f"cache {name} have strides {pages.stride()}; each head's page must be dense: make the cache contiguous")
