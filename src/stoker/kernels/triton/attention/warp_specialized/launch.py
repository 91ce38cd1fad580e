"""The launcher of the warp-specialized prefill kernel, and what that kernel supports."""

from __future__ import annotations

from functools import cache as cached
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stoker.kernels.triton.attention.warp_specialized.kernel import warp_specialized_prefill_kernel
from stoker.kernels.triton.attention.warp_specialized.pipeline import BLOCK_N, PrefillConfig
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.kv_pages import kv_pages
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.types import AttentionParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

BLOCK_M = 128  # rows of a query tile
MIN_TOKENS = 64  # shorter prompts leave most of a tile of keys masked
MANY_TILES_PER_SM = 3
MIN_KEYS = 2048  # of the longest row, where there are fewer tiles than that


def supports_warp_specialized_prefill(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> bool:
    """Whether the prefill rows of `batch` can be computed by this kernel, and fill the device.

    Heads have 64 or 128 features; the cache has the dtype of the queries (bfloat16 or float16), or e4m3, and one tensor map describes all
    its rows. There are no draft trees, prefix LMs, soft caps, chunks or ALiBi.
    """
    size = q.shape[2]
    is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
    has_plain_scores = params.softcap is None and params.chunk is None and params.alibi_slopes is None
    has_plain_rows = batch.tree is None and batch.prefix_lens is None
    if not (supports(q, "wgmma") and is_16_bit and size in (64, 128) and has_plain_scores and has_plain_rows):
        return False
    if cache.values is None or cache.values.shape[3] != size or cache.block_size < 16:
        return False
    if not (has_tensor_map(cache.keys) and has_tensor_map(cache.values)):
        return False
    if cache.keys.dtype not in (q.dtype, torch.float8_e4m3fn):
        return False
    return batch.max_query_len >= MIN_TOKENS and _fills_device(q, cache, batch)


def _fills_device(q: Tensor, cache: KVCache, batch: ForwardBatch) -> bool:
    """Whether there are enough query tiles for this kernel, which has no splits and one CTA per SM.

    With one tile per SM, rows of many keys are faster (512 tokens after 7,680: 123 µs on an H100, 165 with the other kernel), and short
    prompts take as long (1,024 tokens: 29 µs) or longer over e4m3 keys (32 × 64 tokens: 41 and 37 µs).
    """
    tiles, sms = _num_tiles(q, cache, batch), num_sms(q.device)
    return tiles >= MANY_TILES_PER_SM * sms or (tiles >= sms and batch.max_seq_len >= MIN_KEYS)


def warp_specialized_prefill(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams, out: Tensor) -> None:
    """Compute attention of the rows after the decodes into the rows of `out` after theirs."""
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    is_narrow = cache.keys.dtype.itemsize == 1
    heads = min(group, BLOCK_M)
    config = PrefillConfig(
        num_heads=q.shape[1],
        group=group,
        size=q.shape[2],
        block_size=cache.block_size,
        heads=heads,
        tokens=BLOCK_M // heads,
        window=params.window,
        has_mean=cache.key_mean is not None,
        q_stages=2,
        raw_stages=2 if is_narrow else 0,
        key_bits=8 * cache.keys.dtype.itemsize,
    )
    warp_specialized_prefill_kernel[(min(_num_tiles(q, cache, batch), num_sms(q.device)),)](
        q,
        out,
        batch.query_starts,
        batch.seq_lens,
        batch.block_tables,
        batch.decode_count,
        batch.row_count,
        params.sinks,
        tile_counter(q.device),
        kv_pages(cache),
        _rows_of(cache.keys),
        _rows_of(cache.values),
        params.scale,
        batch.num_decodes,
        batch.num_rows,
        q.stride(0),
        q.stride(1),
        batch.block_tables.stride(0),
        CONFIG=config,
        REGISTERS=(224, 56) if is_narrow else (232, 40),
        num_warps=4,
        **pdl_launch_options(q),
    )


def _num_tiles(q: Tensor, cache: KVCache, batch: ForwardBatch) -> int:
    """An upper bound of the number of query tiles (see `row_tiles.num_token_tiles`)."""
    kv_heads = cache.keys.shape[1]
    group = q.shape[1] // kv_heads
    heads = min(group, BLOCK_M)
    row_tiles = (q.shape[0] - batch.num_decodes) // (BLOCK_M // heads) + batch.num_rows - batch.num_decodes
    return row_tiles * kv_heads * cdiv(group, heads)


def has_tensor_map(pages: Tensor) -> bool:
    """Whether blocks and heads of `pages` [blocks, heads, block size, size] begin at whole rows, and the first one where TMA can copy."""
    size = pages.shape[3]
    return pages.stride(0) % size == 0 and pages.stride(1) % size == 0 and pages.data_ptr() % 16 == 0


def _rows_of(pages: Tensor) -> TensorDescriptor:
    """A tensor map of all rows of keys or values [blocks, heads, block size, size], for copies of one block and 128 bytes of its rows."""
    blocks, heads, block_size, size = pages.shape
    rows = ((blocks - 1) * pages.stride(0) + (heads - 1) * pages.stride(1)) // size + block_size
    box = [min(BLOCK_N.value, block_size), min(size, 128 // pages.itemsize)]
    return TensorDescriptor(pages, [rows, size], [size, 1], box, _box_layout(size, 8 * pages.itemsize))


@cached
def _box_layout(size: int, bits: int) -> gl.NVMMASharedLayout:
    """`pipeline.swizzled_layout`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, size * bits // 8), element_bitwidth=bits, rank=2)


@cached
def tile_counter(device: torch.device) -> Tensor:
    """The counter from which CTAs take query tiles: int32 [1], zero after every launch, allocated once per device."""
    return torch.zeros(1, dtype=torch.int32, device=device)
