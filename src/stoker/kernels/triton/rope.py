"""Norms of queries and keys, rotary position embedding (arXiv 2104.09864) and the write into the paged KV cache, in one launch.

With norms (`HeadNorms`), each head x of q and k first becomes x / sqrt(mean(x²) + eps) × weight, rounded to its dtype, which is the
result of `norm.norm` for q and k, without its two launches. For each token t and pair (a, b) of features that rotate together, with angle θ
of the token's position:

    a' = a cos θ - b sin θ        pairs: (0, half), (1, half + 1) ...     or, interleaved: (0, 1), (2, 3) ...
    b' = b cos θ + a sin θ

q [T, num_heads, size] is normalized and rotated in place. k [T, kv_heads, size], likewise, and v [T, kv_heads, value_size] are stored at
slot block × block_size + place of the cache (`kv_pages`): as they are, or in an 8-bit cache as round(x ÷ scale of the head).

Decode steps with few rows do the same within the attention launch (`attention.new_token`, `attention.new_token_8bit`).

With `key_balance`, heads are multiplied by factors per feature and go through a Hadamard transform (`hadamard`), after which no feature
stands out (QuaRot, arXiv 2404.00456); products of queries and keys stay the same. With `key_mean`, keys are stored less a mean.

Grid: axis 0 has groups of tokens, axis 1 tiles of HEADS heads: first those of q, then of k, then of v. Rows of a tile are heads of tokens.

    tile    | q heads 0..7 | q heads 8..15 | ... | k heads 0..7 | v heads 0..7 |

Theoretical floor: reading q, k, v and writing as much, at the speed of memory. For few tokens the launch itself, about 1.2 µs.
With the write to a balanced FP8 cache, Llama-3.1-8B's 8,192 tokens take 55 µs on an H200 (floor 43), 768 take 7.7 (4.0), and 64 1.8.
"""

from __future__ import annotations

from functools import cache as cached
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.head_features import (
    head_features,
    head_scale,
    less_mean,
    load_angles,
    load_factors,
    load_features,
    load_norm,
    load_pairs,
    load_rotary_parts,
    page_offset,
    prepared,
    rotated,
    store_features,
    store_pairs,
    store_rotary_parts,
)
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


class Tile(NamedTuple):
    """The heads and tokens that a CTA computes at a time, and how."""

    heads: int
    tokens: int
    steps: int  # the number of tiles of tokens, one after another
    num_warps: int
    early: bool  # what no kernel of a step writes is loaded before `pdl_wait`
    max_registers: int | None  # of a thread


@triton.jit
def load_of_token(ptr, token, row, num_tokens, EARLY: tl.constexpr):
    """[rows, 1]: the integer of each row's token, `token` [rows, 1] or one token for all rows. Rows past the last token have that one's.

    With EARLY, this and what follows from it are loaded before `pdl_wait`, while the kernel before still computes q, k and v: it does not
    write positions, slots, angles, weights and means. Such loads are volatile, because the assembler moves others behind the wait. Volatile
    loads do not use the L1 cache, so that many tokens load later.
    """
    return tl.load(ptr + tl.minimum(token, num_tokens - 1), volatile=EARLY) + row * 0


@triton.jit(do_not_specialize=["num_tokens", "q_tiles"])
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
    num_tokens,  # T
    q_tiles,  # tiles of q along axis 1; 0: q stays as it is
    kv_tiles,  # tiles of k, and of v
    # Constants
    FEATURES: tl.constexpr,  # HeadFeatures
    Q_FEATURES: tl.constexpr,  # of q, without those that stay as they are
    GROUP: tl.constexpr,  # heads of q for each of k
    BLOCK_SIZE: tl.constexpr,  # tokens of a block
    HEADS: tl.constexpr,  # heads of a tile
    TOKENS: tl.constexpr,  # tokens of a tile
    STEPS: tl.constexpr,  # tiles of tokens that a CTA computes
    EARLY: tl.constexpr,  # see `load_of_token`
    USE_PDL: tl.constexpr,
):
    """Rotate HEADS heads of q of TOKENS × STEPS tokens in place, or store HEADS heads of their k, rotated, or v in the cache: one CTA.

    With a norm in FEATURES, q and k are normalized before. With `key_balance_ptr`, they are also multiplied by its factors and transformed
    (`transformed`), and k is stored less its mean if the cache has means. Both let an 8-bit cache round keys less, and q · k stays the
    same.
    """
    SIZE: tl.constexpr = FEATURES.size
    DTYPE: tl.constexpr = qkv.q_ptr.dtype.element_ty
    tile = tl.program_id(1)
    row = tl.arange(0, HEADS * TOKENS)[:, None]
    begin = tl.program_id(0) * (TOKENS * STEPS)
    end = tl.minimum(begin + TOKENS * STEPS, num_tokens)
    if not EARLY:
        pdl_wait(USE_PDL)
        pdl_launch_dependents(USE_PDL)
    if tile < q_tiles:
        head = tile * HEADS + row % HEADS
        has_head = head < qkv.num_heads
        factors = load_factors(key_balance_ptr, (head // GROUP * 2 + 1) * SIZE, has_head, Q_FEATURES, EARLY)
        for first in range(begin, end, TOKENS):
            token = first if TOKENS == 1 else first + row // HEADS
            inside = (token < num_tokens) & has_head
            offsets = token.to(tl.int64) * qkv.stride_q_token + head * qkv.stride_q_head
            position = load_of_token(positions_ptr, token, row, num_tokens, EARLY)
            angles = load_angles(cos_sin_ptr, position, Q_FEATURES, EARLY)
            weights = load_norm(qkv.q_norm_ptr, head, has_head, Q_FEATURES, EARLY)
            if EARLY:
                pdl_wait(USE_PDL)
                pdl_launch_dependents(USE_PDL)
            parts = load_rotary_parts(qkv.q_ptr, offsets, inside, Q_FEATURES)
            parts = prepared(parts, weights, angles, factors, key_balance_ptr, Q_FEATURES)
            tl.debug_barrier()  # source and target are the same: every thread has loaded its features
            store_rotary_parts(qkv.q_ptr, offsets, parts, 1.0, inside, Q_FEATURES)
    else:
        head = (tile - q_tiles) % kv_tiles * HEADS + row % HEADS
        has_head = head < qkv.num_kv_heads
        if tile < q_tiles + kv_tiles:
            scale = head_scale(cache.key_scale_ptr, head, has_head)
            factors = load_factors(key_balance_ptr, head * (2 * SIZE), has_head, FEATURES, EARLY)
            for first in range(begin, end, TOKENS):
                token = first if TOKENS == 1 else first + row // HEADS
                inside = (token < num_tokens) & has_head
                slot = load_of_token(slots_ptr, token, row, num_tokens, EARLY)
                position = load_of_token(positions_ptr, token, row, num_tokens, EARLY)
                angles = load_angles(cos_sin_ptr, position, FEATURES, EARLY)
                weights = load_norm(qkv.k_norm_ptr, head, has_head, FEATURES, EARLY)
                stored = inside & (slot >= 0)
                if cache.key_mean_ptr is not None:
                    mean_row = head * cache.stride_mean_head + position // mean_tokens() * SIZE
                    mean = load_rotary_parts(cache.key_mean_ptr, mean_row, stored & (position > 0), FEATURES, EARLY)
                if EARLY:
                    pdl_wait(USE_PDL)
                    pdl_launch_dependents(USE_PDL)
                parts = load_rotary_parts(qkv.k_ptr, token.to(tl.int64) * qkv.stride_k_token + head * qkv.stride_k_head, inside, FEATURES)
                parts = prepared(parts, weights, angles, factors, key_balance_ptr, FEATURES)
                if key_balance_ptr is not None:
                    if cache.key_mean_ptr is not None:
                        parts = less_mean(parts, mean, scale)
                else:
                    parts = parts[0].to(DTYPE), parts[1].to(DTYPE), parts[2].to(DTYPE)
                target = page_offset(slot, BLOCK_SIZE, cache.stride_key_block, SIZE) + head * cache.stride_key_head
                store_rotary_parts(cache.keys_ptr, target, parts, scale, stored, FEATURES)
        else:
            if cache.values_ptr is not None:
                VALUE: tl.constexpr = FEATURES.value_size
                scale = head_scale(cache.value_scale_ptr, head, has_head)
                for first in range(begin, end, TOKENS):
                    token = first if TOKENS == 1 else first + row // HEADS
                    inside = (token < num_tokens) & has_head
                    slot = load_of_token(slots_ptr, token, row, num_tokens, EARLY)
                    stored = inside & (slot >= 0)
                    if EARLY:
                        pdl_wait(USE_PDL)
                        pdl_launch_dependents(USE_PDL)
                    source = token.to(tl.int64) * qkv.stride_v_token + head * qkv.stride_v_head
                    x = load_features(qkv.v_ptr, source, inside, 0, VALUE, FEATURES.block_value)
                    target = page_offset(slot, BLOCK_SIZE, cache.stride_value_block, VALUE) + head * cache.stride_value_head
                    store_features(cache.values_ptr, target, x, scale, stored, 0, VALUE, FEATURES.block_value)


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
    changes_all = norms is not None or cache.key_balance is not None
    tile = _tile(tokens, num_heads, kv_heads, max(size, value_size), cache.key_balance is not None, norms is not None)
    q_tiles = cdiv(num_heads, tile.heads) if half or changes_all else 0
    kv_tiles = cdiv(kv_heads, tile.heads)
    if cache.values is None:
        v = k
    q_norm, k_norm, eps = (None, None, None) if norms is None else norms
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    qkv = QKV(q, k, v, num_heads, kv_heads, *strides, q_norm, k_norm)
    rope_store_kernel[(cdiv(tokens, tile.tokens * tile.steps), q_tiles + kv_tiles * (1 if cache.values is None else 2))](
        qkv,
        kv_pages(cache),
        cache.key_balance,
        positions,
        cos_sin,
        slots,
        tokens,
        q_tiles,
        kv_tiles,
        FEATURES=head_features(size, value_size, half, interleaved, eps),
        Q_FEATURES=head_features(size if changes_all or not half else 2 * half, value_size, half, interleaved, eps),
        GROUP=num_heads // kv_heads,
        BLOCK_SIZE=cache.block_size,
        HEADS=tile.heads,
        TOKENS=tile.tokens,
        STEPS=tile.steps,
        EARLY=tile.early,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
        **pdl_launch_options(q),
    )
    return q


@cached
def _tile(tokens: int, num_heads: int, kv_heads: int, size: int, is_transformed: bool, is_normed: bool) -> Tile:
    """The work of a CTA, as measured (`h200_rotation.json`).

    An H200 starts one CTA each 1.22 ns, whatever CTAs do: with one token and four heads in each, 8,192 tokens of 32 / 8 heads took 120 µs.
    Steps of many tokens therefore have tiles of 2,048 features, and with the transform several in a CTA, as long as there are CTAs for all
    SMs. The numbers of CTAs are those of multiples of 64 tokens, of each of which the ahead-of-time trace has a step
    (`aot_trace.EAGER_TOKENS`).
    """
    width, heads = next_power_of_2(size), 8 if kv_heads % 8 == 0 else 4  # eight, if those of keys and values can be divided so
    full = max(1, 2048 // (heads * width))  # tokens
    if is_transformed:
        tile_tokens = 1 if tokens <= 256 else full
        rounded = 64 * cdiv(tokens, 64)
        num_ctas = cdiv(rounded, tile_tokens) * (cdiv(num_heads, heads) + 2 * cdiv(kv_heads, heads))
        num_warps = min(16, max(1, heads * tile_tokens * width // 512))  # 16 features per thread
        if tokens <= 256:
            return Tile(heads, tile_tokens, 1, num_warps, num_ctas <= 192 * heads, None)
        steps = 1 if num_ctas <= max(1600, rounded) else 2 if num_ctas < 8192 else 4
        # 64 registers are 32 warps per SM. Wide heads with norms need more.
        return Tile(heads, tile_tokens, steps, num_warps, False, None if is_normed and width > 128 else 64)
    if tokens < 64:
        return Tile(4, 1, 1, 2, False, None)
    if tokens < (4096 if is_normed else 512) or width > 256:
        return Tile(8, 1, 1, 4, False, None)
    return Tile(heads, full, 1, 4, False, None)


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
    inside = head < num_heads
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    position = tl.load(positions_ptr + token)
    angles = load_angles(cos_sin_ptr, tl.broadcast_to(position, [HEADS, 1]), FEATURES)
    offsets = token * stride_token + head * stride_head
    first, second = load_pairs(x_ptr, offsets, inside, FEATURES)
    first, second, _ = rotated((first.to(tl.float32), second.to(tl.float32), second), angles, FEATURES)
    tl.debug_barrier()
    store_pairs(x_ptr, offsets, first, second, 1.0, inside, FEATURES)


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
            FEATURES=head_features(size, size, cos_sin.shape[1] // 2, interleaved),
            HEADS=4,
            num_warps=2,
            **pdl_launch_options(x),
        )
    return x
