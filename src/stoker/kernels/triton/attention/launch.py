"""Paged attention: decode rows and ragged prefill rows each as one launch of one kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as cached
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.kernels.triton.attention.kernel import attention_kernel
from stoker.kernels.triton.attention.tiles import Splits, Tile, choose_splits, decode_tile, prefill_tile
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.rope import require_dense_pages, rope_store
from stoker.kernels.types import MEAN_HEAD, AttentionParams, Rotary, takes_mean

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_DTYPES = (*QUERY_DTYPES, torch.int8, torch.float8_e4m3fn)
BULK_SIZES = (64, 128, 256)  # head sizes of one part
MAX_SPLIT_PROGRAMS = 1 << 16
MOST_MEETING = 4096  # words of a split's result that others wait for
# Of what splits leave to be combined. A launch that would need more is of thousands of programs, which fill the device as they are:
# 8,192 tokens of a prompt of 131,072 with 32 / 8 heads would take 4 GiB, with 128 heads of a latent of 576 all 74.
MAX_SCRATCH_BYTES = 512 << 20


class New(NamedTuple):
    """What a step's tokens add to the cache: k [T, kv_heads, D] before it rotates, v [T, kv_heads, Dv]."""

    k: Tensor
    v: Tensor
    rotary: Rotary


def rope_attention(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """See `ops.rope_attention`."""
    if not (batch.is_decode and _keeps_dtype(q, cache) and _is_worth(q, cache, params)):
        return attention(rope_store(q, k, v, *rotary, cache, batch.slots), cache, batch, params)
    _check(q, cache)
    out = _output(q, cache)
    decode(q, cache, batch, params, out, new=New(k, v, rotary))
    return out.flatten(1)


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """See `ops.attention`. Launches of one device must run one after another: they share the counters of finished splits."""
    _check(q, cache)
    out = _output(q, cache)
    if batch.num_decodes:
        decode(q, cache, batch, params, out)
    if batch.num_decodes < batch.num_rows and q.shape[0] > batch.num_decodes:
        prefill(q, cache, batch, params, out)
    return out.flatten(1)


def _output(q: Tensor, cache: KVCache) -> Tensor:
    values = cache.keys if cache.values is None else cache.values
    _arrived(q.device), _messages(q.device)  # made on the first call of all, so that a captured graph never owns them
    return torch.empty((q.shape[0], q.shape[1], values.shape[-1]), dtype=q.dtype, device=q.device)


def _is_worth(q: Tensor, cache: KVCache, params: AttentionParams) -> bool:
    """Whether rotating in attention's launch is faster than one of its own.

    Between, the launch before would end program by program, and the first multiprocessors that are free take attention's programs two at a
    time (8 rows of 32 / 8 heads over 1,000 keys: 4.58 ms a step, 4.50 apart; 1 row 3.95 and 3.98, 64 rows 6.41 and 6.48).
    """
    return q.shape[0] == 1 or _overlaps_fused_layer(q, params) or q.shape[0] * cache.keys.shape[1] >= 3 * num_sms(q.device)


def _overlaps_fused_layer(q: Tensor, params: AttentionParams) -> bool:
    """Whether the fused layer kernel has room beside attention on an SM: from three tokens on it takes all shared memory."""
    return params.before_fused_layer and q.shape[0] <= 2


def _keeps_dtype(q: Tensor, cache: KVCache) -> bool:
    """Whether keys and values are stored as they are."""
    return cache.values is not None and cache.keys.dtype == q.dtype and cache.key_balance is None


def decode(
    q: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    params: AttentionParams,
    out: Tensor,
    tile: Tile | None = None,
    splits: Splits | None = None,
    new: New | None = None,
) -> None:
    """The rows of one query each, into out[: num_decodes]; with `new`, their keys and values into the cache.

    `tile` and `splits` stand in for the tuned choice.
    """
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    pairs = _pairs(q, cache)
    if tile is None:
        programs = batch.num_decodes * kv_heads
        tile = decode_tile(q.shape[2], q.dtype, group, programs, num_sms(q.device), pairs is not None)
    tile_heads = min(group, tile.block_m)
    programs = batch.num_decodes * kv_heads * triton.cdiv(group, tile_heads)
    splits = splits or _splits(programs, tile_heads * out.shape[2], tile, batch.max_seq_len, q.device)
    _launch(q, cache, batch, params, out, tile, splits, tile_heads, 1, programs, True, new, pairs)


def prefill(
    q: Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    params: AttentionParams,
    out: Tensor,
    tile: Tile | None = None,
    splits: Splits | None = None,
) -> None:
    """The rows from num_decodes on, into out[num_decodes :]. `tile` and `splits` stand in for the tuned choice."""
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    num_tokens, num_rows = q.shape[0] - batch.num_decodes, batch.num_rows - batch.num_decodes
    if tile is None:
        programs, narrow = triton.cdiv(num_tokens * group, 128) * kv_heads, cache.keys.dtype.itemsize == 1
        size = triton.next_power_of_2(q.shape[2]) if _wants_whole(cache) else q.shape[2]
        tile = prefill_tile(size, q.dtype, batch.max_query_len * group, programs, num_sms(q.device), narrow)
    tile_heads = min(group, tile.block_m)
    tokens = tile.block_m // tile_heads
    programs = (num_tokens // tokens + num_rows) * kv_heads * triton.cdiv(group, tile_heads)
    splits = splits or _splits(programs, tokens * tile_heads * out.shape[2], tile, batch.max_seq_len, q.device)
    _launch(q, cache, batch, params, out, tile, splits, tile_heads, tokens, programs, False)


def _splits(programs: int, results: int, tile: Tile, max_seq_len: int, device: torch.device) -> Splits:
    """The tuned choice, within what may be allocated. `results`: float32 numbers that a program leaves."""
    most = MAX_SCRATCH_BYTES // (4 * results * programs)
    if programs > MAX_SPLIT_PROGRAMS or most < 2:
        return Splits()
    chosen = choose_splits(programs, triton.cdiv(max_seq_len, tile.block_n), max_seq_len, num_sms(device))
    return chosen if chosen.count <= most else replace(chosen, count=1 << (most.bit_length() - 1))


def _launch(
    q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams, out: Tensor,
    tile: Tile, splits: Splits, tile_heads: int, tokens: int, programs: int, is_decode: bool, new: New | None = None,
    pairs: str | None = None,
) -> None:  # fmt: skip
    keys, values = cache.keys, cache.values
    if cache.key_mean is not None and (params.window is not None or params.chunk is not None):
        # Keys begin at a block, and no tile may have keys of two means.
        tile = replace(tile, block_n=min(tile.block_n, cache.block_size))
    num_heads, size = q.shape[1:]
    value_size = out.shape[2]
    whole = tile.block_m >= 64 and _wants_whole(cache)
    part1, part2 = _parts(size, whole) if pairs is None else (size // 2,) * 2
    value_part1, value_part2 = _parts(value_size, whole) if pairs is None else (value_size // 2,) * 2
    partial = lse = messages = None
    power = triton.next_power_of_2(splits.count)
    columns = _columns(power, tile_heads, value_size, tile) if is_decode and programs * splits.count <= num_sms(q.device) else 0
    if columns:
        messages = _messages(q.device)
    elif splits.count > 1:
        partial = torch.empty((programs, splits.count, tokens * tile_heads, value_size), dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    half, added, strides = 0, (None,) * 5, (0,) * 4
    if new is not None:
        k, v, (positions, cos_sin, _) = new
        half = 0 if cos_sin is None else cos_sin.shape[1] // 2
        added = k, v, positions, cos_sin, batch.slots
        strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    held = power * value_part1  # values a thread block holds for each row that it combines
    attention_kernel[(programs, splits.count)](
        q, keys, values, *_page_descriptors(cache, tile), out, batch.block_tables, batch.seq_lens, batch.query_starts, batch.prefix_lens,
        cache.key_scale, cache.key_scale if values is None else cache.value_scale, cache.key_mean,
        params.alibi_slopes, params.sinks, partial, lse, _arrived(q.device), messages, params.scale,
        batch.num_decodes, batch.num_rows, splits.count, splits.min_tiles, *added,
        q.stride(0), q.stride(1), batch.block_tables.stride(0), keys.stride(0), keys.stride(1),
        0 if values is None else values.stride(0), 0 if values is None else values.stride(1),
        0 if cache.key_mean is None else cache.key_mean.stride(0), *strides,
        HALF=half, INTERLEAVED=new is not None and new.rotary.interleaved,
        DECODE=is_decode, NUM_HEADS=num_heads, GROUP=num_heads // keys.shape[1], TILE_HEADS=tile_heads, TOKENS=tokens,
        SIZE=size, PART1=part1, PART2=part2, VALUE_SIZE=value_size, VALUE_PART1=value_part1, VALUE_PART2=value_part2,
        SOFTCAP=params.softcap, WINDOW=params.window, CHUNK=params.chunk, BLOCK_SIZE=cache.block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SPLITS=power, COLUMNS=columns,
        COMBINE_ROWS=min(triton.next_power_of_2(tokens * tile_heads), max(1, 2048 * tile.num_warps // held)),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",  # three tf32 products give float32's precision
        PAIRED=pairs, PACKED=not q.is_cpu, num_warps=tile.num_warps, num_stages=tile.num_stages,
        LAUNCH_DEPENDENTS=_lets(q, programs, params), **pdl_launch_options(q),
    )  # fmt: skip


def _page_descriptors(cache: KVCache, tile: Tile) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """The caches as [tokens of all blocks and heads, head size] for bulk copies of [block_n, head size]; None where that does not fit."""
    pages = [cache.keys] if cache.values is None else [cache.keys, cache.values]
    fits = tile.bulk_copy and tile.block_n <= cache.block_size and all(p.is_contiguous() and p.shape[3] in BULK_SIZES for p in pages)
    if not fits:
        return None, None
    made = [TensorDescriptor.from_tensor(p.view(-1, p.shape[3]), [tile.block_n, p.shape[3]]) for p in pages]
    return made[0], made[-1]


def _pairs(q: Tensor, cache: KVCache) -> str | None:
    """What a decode reads two of at once: the numbers of an 8-bit cache, when half a head is a power of two."""
    pages = [cache.keys] if cache.values is None else [cache.keys, cache.values]
    if q.dtype == torch.float32 or cache.values is None or any(p.shape[3] not in BULK_SIZES for p in pages):
        return None
    return {torch.int8: "bytes", torch.float8_e4m3fn: "e4m3"}.get(cache.keys.dtype)


def _wants_whole(cache: KVCache) -> bool:
    """Whether tiles of 64 rows take heads that are padded to one part. Of two parts of 8 bits they have more descriptors of matrix
    instructions than there are uniform registers, and the assembler (12.8) loses one: heads of 80 and 96 gave wrong numbers, or an illegal
    address."""
    return cache.values is not None and cache.keys.dtype.itemsize == 1


def _parts(size: int, is_whole: bool = False) -> tuple[int, int]:
    """A head size as two powers of two, each 0 or ≥ 16 (the smallest side of a matrix instruction's tile), or as one that it fits."""
    if is_whole:
        return max(16, triton.next_power_of_2(size)), 0
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def _lets(q: Tensor, programs: int, params: AttentionParams) -> bool:
    """Whether the next kernel's programs may come in before a launch's are done. Of few programs they would take the multiprocessors that
    its splits need (one row of 32 / 8 heads over 1,000 keys: 4.20 ms a step of Llama-3.1-8B, 3.98 otherwise; eight rows: 4.53 and 4.58).
    The fused layer kernel has one program for each, and its first weights arrive meanwhile (FP8 and one row: 1 µs a layer)."""
    return 4 * programs > num_sms(q.device) or _overlaps_fused_layer(q, params)


def _columns(splits: int, heads: int, size: int, tile: Tile) -> int:
    """How many columns of a head a split combines when all meet, so that none has two pieces; 0: they don't meet.

    Each word of a piece has one reader among a program's threads. Where splits had two pieces (8 rows of 32 / 8 heads over 1,000 keys, two
    splits) a step took 3.04 ms instead of 2.96.
    """
    columns = min(size, max(16, triton.next_power_of_2(heads * size) // splits))
    one_each = splits >= max(heads, 2) and splits * columns >= 64 * tile.num_warps
    return columns if one_each and size & (size - 1) == 0 and heads * size <= MOST_MEETING else 0


@cached
def _messages(device: torch.device) -> Tensor:
    """Words of splits that meet; every launch leaves them at zero."""
    return torch.zeros(2 * num_sms(device) * MOST_MEETING, dtype=torch.int64, device=device)


@cached
def _arrived(device: torch.device) -> Tensor:
    """Counters of finished splits, one a program; every launch leaves them at zero."""
    return torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)


def _check_mean(size: int, cache: KVCache) -> None:
    if cache.values is None:
        raise ValueError("latent keys are values too, and can't be stored less a mean")
    if not takes_mean(size):
        raise ValueError(f"keys of {size} features can't be stored less a mean: only powers of two up to {MEAN_HEAD}")


def _check(q: Tensor, cache: KVCache) -> None:
    require_dense_pages(cache)
    if q.dtype not in QUERY_DTYPES or cache.keys.dtype not in CACHE_DTYPES:
        raise ValueError(f"attention of {q.dtype} queries over a {cache.keys.dtype} cache; takes {QUERY_DTYPES} over {CACHE_DTYPES}")
    if cache.key_mean is not None:
        _check_mean(q.shape[2], cache)
    if q.stride(-1) != 1:
        raise ValueError(f"attention queries have strides {q.stride()}; the last axis must be dense")
    if q.shape[1] % cache.keys.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {cache.keys.shape[1]} key heads")
    if cache.block_size & (cache.block_size - 1):
        raise ValueError(f"block size {cache.block_size} is no power of two: build the engine with 16, 32, 64 or 128 tokens a block")
