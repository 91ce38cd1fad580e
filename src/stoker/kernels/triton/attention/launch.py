"""The launchers of paged attention: one launch for the decode rows of a step, one for its prefill rows.

Nothing here reads a value from the device: grids have upper bounds, and kernels find lengths and unused CTAs themselves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache as cached
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stoker.kernels.triton.attention.arguments import (
    HeadShape,
    NewTokens,
    OperandFormat,
    QueryTile,
    ScoreOptions,
    SplitScratch,
    SplitShape,
    TreePages,
)
from stoker.kernels.triton.attention.decode_kernel import decode_attention_kernel
from stoker.kernels.triton.attention.prefill_kernel import prefill_attention_kernel
from stoker.kernels.triton.attention.tiles import (
    MAX_DECODE_ROWS,
    AttentionTile,
    Splits,
    choose_splits,
    decode_tile,
    prefill_tile,
    verify_tile,
)
from stoker.kernels.triton.attention.warp_specialized.launch import (
    supports_warp_specialized_prefill,
    tile_counter,
    warp_specialized_prefill,
)
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.head_features import HeadFeatures, head_features
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.kv_pages import kv_pages, require_dense_pages
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.rope import rope_store
from stoker.kernels.types import MAX_MEAN_HEAD_SIZE, AttentionParams, Rotary, supports_key_mean

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_DTYPES = (*QUERY_DTYPES, torch.int8, torch.float8_e4m3fn)
PAIRED_SIZES = (64, 128, 256)  # head sizes that are read two 8-bit features at a time: half of them is a power of two
MAX_VERIFIED_TOKENS = 9  # rows of at most this number of tokens have tiles for draft tokens (`verify_tile`)
MAX_SPLIT_TILES = 1 << 16  # query tiles that have a counter
# Per thread of a CTA that stores a token of an 8-bit cache: its 4 warps and the 8 warps of a CTA of the fused layer kernel, which have 168
# registers, too, fit the 65,536 of an SM.
MAX_KEY_ROW_REGISTERS = 168
MAX_FLAG_WORDS = 8192  # words of a split's result when splits combine by flags
# Scratch for splits of one launch. A launch that would need more has thousands of tiles, which fill the device without splits: 8,192
# tokens of a prompt of 131,072 with 32 / 8 heads would take 4 GiB, with 128 heads of a latent of 576 all 74 GiB.
MAX_SCRATCH_BYTES = 512 << 20


class StepTokens(NamedTuple):
    """The keys and values that a decode step adds to the cache: k [T, kv_heads, D] before norm and rotation, v [T, kv_heads, Dv]."""

    k: Tensor
    v: Tensor
    rotary: Rotary


def rope_attention(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Norms, rotary embedding, cache write and attention (`ops.rope_attention`), in one launch for decode steps where that is faster."""
    if not (batch.is_decode and _is_one_launch_faster(q, rotary, cache, params)):
        return attention(rope_store(q, k, v, rotary, cache, batch.slots), cache, batch, params)
    _check(q, cache)
    out = _empty_output(q, cache)
    decode(q, cache, batch, params, out, new=StepTokens(k, v, rotary))
    return out.flatten(1)


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Paged attention (`ops.attention`) in one launch for decode rows and one for prefill rows.

    Launches on one device must run one after another, because they share the memory in which splits are combined.
    """
    _check(q, cache)
    out = _empty_output(q, cache)
    if batch.num_decodes or batch.decode_count is not None:
        decode(q, cache, batch, params, out)
    if batch.num_decodes < batch.num_rows and q.shape[0] > batch.num_decodes:
        prefill(q, cache, batch, params, out)
    return out.flatten(1)


def _empty_output(q: Tensor, cache: KVCache) -> Tensor:
    """The uninitialized output [T, heads, Dv]. Also allocates the memory that all launches share."""
    values = cache.keys if cache.values is None else cache.values
    # Allocated by the first call of all, so that no captured graph owns them.
    _finished_counters(q.device), _flag_words(q.device), tile_counter(q.device)
    return torch.empty((q.shape[0], q.shape[1], values.shape[-1]), dtype=q.dtype, device=q.device)


def _is_one_launch_faster(q: Tensor, rotary: Rotary, cache: KVCache, params: AttentionParams) -> bool:
    """Whether the attention launch of a decode step can process the new tokens, and is faster so than with `rope_store` before it.

    It is slower for a few CTAs more than the device has SMs: the launch before ends CTA by CTA, and the first free SMs take two attention
    CTAs each (32 / 8 heads over 1,000 keys, ms per step in one launch and in two: 1 row 3.95 and 3.98, 8 rows 4.58 and 4.50, 64 rows 6.41
    and 6.48). Over an 8-bit cache, each CTA of many rows would repeat the transform of its queries, too. One and two rows over 1,000 keys
    take 5.7 and 6.9 µs instead of 6.9 and 8.5 (`h200_new_tokens.json`).
    """
    is_small = q.shape[0] == 1 or _runs_beside_fused_layer(q, params)
    if _is_stored_unchanged(q, cache):
        return is_small or q.shape[0] * cache.keys.shape[1] >= 3 * num_sms(q.device)
    return is_small and _is_key_row_supported(q, rotary, cache)


def _runs_beside_fused_layer(q: Tensor, params: AttentionParams) -> bool:
    """Whether CTAs of the following fused layer kernel fit on the same SMs: for more than two tokens it uses all their shared memory."""
    return params.before_fused_layer and q.shape[0] <= 2


def _is_stored_unchanged(q: Tensor, cache: KVCache) -> bool:
    """Whether the cache holds keys and values in the queries' dtype, without a scale or transformation."""
    return cache.values is not None and cache.keys.dtype == q.dtype and cache.key_balance is None


def _is_key_row_supported(q: Tensor, rotary: Rotary, cache: KVCache) -> bool:
    """Whether the new key of an 8-bit cache can be a row of the query tile (`new_token_8bit`).

    Pairs of features must be read at once, all heads of a group and the key fit a tile, and all, a half or none of the features rotate.
    A cache that has means of keys without their balance goes to `rope_store`, which raises ValueError.
    """
    group, dim = q.shape[1] // cache.keys.shape[1], 0 if rotary.cos_sin is None else rotary.cos_sin.shape[1]
    has_coordinates = cache.key_mean is None or cache.key_balance is not None
    return has_coordinates and _pairs(q, cache) is not None and group < MAX_DECODE_ROWS and dim in (0, q.shape[2] // 2, q.shape[2])


def decode(
    q: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    params: AttentionParams,
    out: Tensor,
    tile: AttentionTile | None = None,
    splits: Splits | None = None,
    new: StepTokens | None = None,
) -> None:
    """Compute attention of the decode rows into the first rows of `out`. With `new`, first store their keys and values in the cache.

    `tile` and `splits` override the choice from the tuning table.
    """
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    pairs = _pairs(q, cache)
    num_rows = batch.num_decodes if batch.decode_count is None else min(batch.num_rows, q.shape[0])
    if tile is None:
        rows_of_tile = group if new is None or pairs is None else group + 1  # the new key is a row, too
        tile = decode_tile(
            q.shape[2], q.dtype, rows_of_tile, num_rows * kv_heads, num_sms(q.device), device_tuning(q.device), pairs is not None
        )
    tile_heads = min(group, tile.block_m)
    num_tiles = num_rows * kv_heads * cdiv(group, tile_heads)
    if splits is None:
        splits = _splits(
            num_tiles, tile_heads * out.shape[2], tile, batch.max_seq_len, q.device,
            is_decode=True, has_split_tokens=batch.split_tokens is not None,
        )  # fmt: skip
    tile = _aligned_to_means(tile, cache, params)
    shape = _head_shape(q, cache, out, tile, pairs)
    columns = 0
    if num_tiles * splits.count <= num_sms(q.device):  # all CTAs are resident at once
        columns = flag_columns(splits.count, tile_heads, shape.value_size, tile.num_warps)
    split_shape, scratch = _split_arguments(q, shape, tile, splits, num_tiles, tile_heads, columns)
    if new is not None and splits.by_lengths:
        # Combining all rows at once takes 144 registers beside the rotation, with which three CTAs fit an SM; in two passes it is 112.
        split_shape = split_shape._replace(combine_rows=max(1, split_shape.combine_rows // 2))
    tokens, features = (None, None) if new is None else _new_tokens(new, cache, batch)
    decode_attention_kernel[(num_tiles, splits.count)](
        q,
        out,
        batch.seq_lens,
        batch.block_tables,
        batch.decode_count,
        batch.split_tokens if splits.by_lengths else None,
        batch.prefix_lens,
        params.alibi_slopes,
        params.sinks,
        kv_pages(cache),
        tokens,
        scratch,
        params.scale,
        splits.count,
        splits.min_tiles,
        q.stride(0),
        q.stride(1),
        batch.block_tables.stride(0),
        SHAPE=shape,
        TILE=QueryTile(tile.block_m, tile.block_n, tile_heads, 1),
        OPTIONS=ScoreOptions(params.softcap, params.window, params.chunk),
        FEATURES=features,
        SPLITS=split_shape,
        FORMAT=_operand_format(q, pairs),
        LAUNCH_DEPENDENTS=_launches_dependents(q, num_tiles, params),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=None if new is None or pairs is None else MAX_KEY_ROW_REGISTERS,
        **pdl_launch_options(q),
    )


def prefill(
    q: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    params: AttentionParams,
    out: Tensor,
    tile: AttentionTile | None = None,
    splits: Splits | None = None,
) -> None:
    """Compute attention of the rows after the decodes into the rows of `out` after theirs.

    `tile` and `splits` override the choice from the tuning table, and of the warp-specialized kernel where that is supported.
    """
    if tile is None and splits is None and supports_warp_specialized_prefill(q, cache, batch, params):
        warp_specialized_prefill(q, cache, batch, params, out)
        return
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    num_tokens, num_rows = q.shape[0] - batch.num_decodes, batch.num_rows - batch.num_decodes
    if tile is None:
        num_tiles, narrow = cdiv(num_tokens * group, 128) * kv_heads, cache.keys.dtype.itemsize == 1
        size = next_power_of_2(q.shape[2]) if _needs_one_part(cache) else q.shape[2]
        arguments = (size, q.dtype, batch.max_query_len * group, num_tiles, num_sms(q.device), device_tuning(q.device), narrow)
        tile = (verify_tile(*arguments) if batch.max_query_len <= MAX_VERIFIED_TOKENS else None) or prefill_tile(*arguments)
    tile_heads = min(group, tile.block_m)
    tokens = tile.block_m // tile_heads
    num_tiles = (num_tokens // tokens + num_rows) * kv_heads * cdiv(group, tile_heads)  # upper bound: see `row_tiles`
    splits = splits or _splits(num_tiles, tokens * tile_heads * out.shape[2], tile, batch.max_seq_len, q.device)
    tile = _aligned_to_means(tile, cache, params)
    shape = _head_shape(q, cache, out, tile, None)
    columns = 0
    if batch.max_query_len <= min(tokens, MAX_VERIFIED_TOKENS) and num_tiles * splits.count <= num_sms(q.device):
        columns = flag_columns(splits.count, tokens * tile_heads, shape.value_size, tile.num_warps, batch.max_query_len * tile_heads)
    split_shape, scratch = _split_arguments(q, shape, tile, splits, num_tiles, tokens * tile_heads, columns)
    prefill_attention_kernel[(num_tiles, splits.count)](
        q,
        out,
        batch.query_starts,
        batch.seq_lens,
        batch.block_tables,
        batch.decode_count,
        batch.row_count,
        batch.prefix_lens,
        None if batch.tree is None else TreePages(batch.tree.masks, batch.tree.starts, batch.positions),
        params.alibi_slopes,
        params.sinks,
        kv_pages(cache),
        scratch,
        params.scale,
        batch.num_decodes,
        batch.num_rows,
        splits.count,
        splits.min_tiles,
        q.stride(0),
        q.stride(1),
        batch.block_tables.stride(0),
        SHAPE=shape,
        TILE=QueryTile(tile.block_m, tile.block_n, tile_heads, tokens),
        OPTIONS=ScoreOptions(params.softcap, params.window, params.chunk),
        SPLITS=split_shape,
        FORMAT=_operand_format(q, None),
        LAUNCH_DEPENDENTS=_launches_dependents(q, num_tiles, params),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch_options(q),
    )


def _splits(
    num_tiles: int, results: int, tile: AttentionTile, max_seq_len: int, device: torch.device, is_decode: bool = False,
    has_split_tokens: bool = False,
) -> Splits:  # fmt: skip
    """The number of splits for `num_tiles` query tiles, limited so that their results fit MAX_SCRATCH_BYTES.

    `results` is the number of float32 values that each split of a tile stores. The last two parameters are as in `choose_splits`.
    """
    most = MAX_SCRATCH_BYTES // (4 * results * num_tiles)
    if num_tiles > MAX_SPLIT_TILES or most < 2:
        return Splits()
    key_tiles = cdiv(max_seq_len, tile.block_n)
    chosen = choose_splits(num_tiles, key_tiles, max_seq_len, num_sms(device), is_decode, has_split_tokens)
    return chosen if chosen.count <= most else replace(chosen, count=1 << (most.bit_length() - 1))


def _split_arguments(
    q: Tensor, shape: HeadShape, tile: AttentionTile, splits: Splits, num_tiles: int, tile_rows: int, columns: int = 0
) -> tuple[SplitShape, SplitScratch]:
    """The constants and the scratch memory with which the splits of a launch are combined.

    `columns` > 0 selects the combination by flags (see `flag_columns`); 0 by counter.
    """
    power = next_power_of_2(splits.count)
    partial = lse = words = None
    if columns:
        words = _flag_words(q.device)
    elif splits.count > 1:
        partial = torch.empty((num_tiles, splits.count, tile_rows, shape.value_size), dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    row_values = power * shape.value_part1  # float32 values that a CTA holds per row that it combines: at most 64 per thread in all
    combine_rows = min(next_power_of_2(tile_rows), max(1, 2048 * tile.num_warps // row_values))
    return SplitShape(power, combine_rows, columns), SplitScratch(partial, lse, _finished_counters(q.device), words)


def _new_tokens(new: StepTokens, cache: KVCache, batch: ForwardBatch) -> tuple[NewTokens, HeadFeatures]:
    """The kernel arguments `new` and FEATURES for the new tokens of a decode step: their tensors and strides, and how they are rotated."""
    k, v, (positions, cos_sin, interleaved, norms) = new
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    q_norm, k_norm, eps = (None, None, None) if norms is None else norms
    strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    tokens = NewTokens(k, v, positions, cos_sin, batch.slots, q_norm, k_norm, cache.key_balance, *strides)
    return tokens, head_features(k.shape[2], v.shape[2], half, interleaved, eps)


def _head_shape(q: Tensor, cache: KVCache, out: Tensor, tile: AttentionTile, pairs: str | None) -> HeadShape:
    """The constants SHAPE of a launch. `pairs` is a result of `_pairs`."""
    num_heads, size = q.shape[1:]
    value_size = out.shape[2]
    if pairs is None:
        is_whole = tile.block_m >= 64 and _needs_one_part(cache)
        parts = (*_parts(size, is_whole), *_parts(value_size, is_whole))
    else:
        parts = (size // 2, size // 2, value_size // 2, value_size // 2)
    return HeadShape(num_heads, num_heads // cache.keys.shape[1], size, value_size, cache.block_size, *parts)


def _parts(size: int, is_whole: bool = False) -> tuple[int, int]:
    """The widths of the two parts in which a head of `size` features is processed: powers of two of at least 16, the second one may be 0.

    16 is the smallest side of a matrix instruction. With `is_whole` there is one part that holds all features.
    """
    if is_whole:
        return max(16, next_power_of_2(size)), 0
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, max(16, next_power_of_2(rest)) if rest > 0 else 0


def _needs_one_part(cache: KVCache) -> bool:
    """Whether tiles of 64 rows and more pad heads to one part: for 8-bit caches.

    With two parts of 8 bits they have more matrix descriptors than there are uniform registers, and ptxas 12.8 loses one: heads of 80 and
    96 gave wrong results, or an illegal address.
    """
    return cache.values is not None and cache.keys.dtype.itemsize == 1


def _pairs(q: Tensor, cache: KVCache) -> str | None:
    """The format ("bytes" or "e4m3") of an 8-bit cache from which decode loads two features at once (`paired_8bit`), else None."""
    pages = [cache.keys] if cache.values is None else [cache.keys, cache.values]
    if q.dtype == torch.float32 or cache.values is None or any(p.shape[3] not in PAIRED_SIZES for p in pages):
        return None
    return {torch.int8: "bytes", torch.float8_e4m3fn: "e4m3"}.get(cache.keys.dtype)


def _operand_format(q: Tensor, pairs: str | None) -> OperandFormat:
    """The constants FORMAT: products of float32 use tf32x3, and the PTX of `paired_8bit` is used on a GPU only."""
    # Three tf32 products have the precision of float32.
    return OperandFormat("tf32x3" if q.dtype == torch.float32 else "tf32", pairs, not q.is_cpu)


def _aligned_to_means(tile: AttentionTile, cache: KVCache, params: AttentionParams) -> AttentionTile:
    """The tile, with at most a block of keys if key means are combined with a window or chunks.

    Keys may then begin at any block, and no tile may have keys of two means.
    """
    if cache.key_mean is not None and (params.window is not None or params.chunk is not None):
        return replace(tile, block_n=min(tile.block_n, cache.block_size))
    return tile


def _launches_dependents(q: Tensor, num_tiles: int, params: AttentionParams) -> bool:
    """Whether CTAs of the next kernel may start before this launch has ended.

    With few tiles they would occupy the SMs that the splits need (Llama-3.1-8B, 1,000 keys, ms per step with and without: one row 4.20 and
    3.98, eight rows 4.53 and 4.58). A fused layer kernel has one CTA per SM and loads its first weights meanwhile (FP8, one row: 1 µs per
    layer).
    """
    return 4 * num_tiles > num_sms(q.device) or _runs_beside_fused_layer(q, params)


def flag_columns(num_splits: int, tile_rows: int, size: int, num_warps: int, verified_rows: int = 0) -> int:
    """The number of columns of a head that a split combines at a time by flags. 0 means: combine by counter.

    A decode tile combines by flags if each split has at most one slice: where splits had two (8 rows of 32 / 8 heads over 1,000 keys, two
    splits) a step took 3.04 ms instead of 2.96. The rows of draft tokens in a tile, at most `verified_rows`, may be two slices per split,
    because the counter's last split would combine them alone, a few rows at a time. Each thread of a CTA reads at least two words.
    """
    power, used_rows = next_power_of_2(num_splits), verified_rows or tile_rows
    columns = min(size, max(16, next_power_of_2(used_rows * size) // power))
    slices = cdiv(used_rows * (size // columns), power)
    fits = power > 1 and slices <= (2 if verified_rows else 1) and power * columns >= 64 * num_warps
    return columns if fits and size & (size - 1) == 0 and tile_rows * size <= MAX_FLAG_WORDS else 0


@cached
def _flag_words(device: torch.device) -> Tensor:
    """The words of splits that are combined by flags: int64, zero after every launch, allocated once per device."""
    return torch.zeros(2 * num_sms(device) * MAX_FLAG_WORDS, dtype=torch.int64, device=device)


@cached
def _finished_counters(device: torch.device) -> Tensor:
    """Counters of finished splits, one int32 per query tile: zero after every launch, allocated once per device."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def _check_key_mean(size: int, cache: KVCache) -> None:
    """Raise ValueError if keys with heads of `size` features cannot be stored after subtracting a mean."""
    if cache.values is None:
        raise ValueError("a latent cache can't subtract key means: its keys are the values too")
    if not supports_key_mean(size):
        raise ValueError(f"keys of {size} features can't be stored less a mean: only powers of two up to {MAX_MEAN_HEAD_SIZE}")


def _check(q: Tensor, cache: KVCache) -> None:
    """Raise ValueError for dtypes, strides or head counts that the kernels do not support."""
    require_dense_pages(cache)
    if q.dtype not in QUERY_DTYPES or cache.keys.dtype not in CACHE_DTYPES:
        raise ValueError(f"attention of {q.dtype} queries over a {cache.keys.dtype} cache; supported: {QUERY_DTYPES} over {CACHE_DTYPES}")
    if cache.key_mean is not None:
        _check_key_mean(q.shape[2], cache)
    if q.stride(-1) != 1:
        raise ValueError(f"attention queries have strides {q.stride()}; the last axis must be dense")
    if q.shape[1] % cache.keys.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {cache.keys.shape[1]} key heads")
    if cache.block_size & (cache.block_size - 1):
        raise ValueError(f"block size {cache.block_size} is no power of two: build the engine with 16, 32, 64 or 128 tokens per block")
