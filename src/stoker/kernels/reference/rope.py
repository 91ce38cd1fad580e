"""Rotary positions (arXiv 2104.09864) and the write into the paged cache, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.layers.batch import KVCache


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor | None, interleaved: bool, cache: KVCache, slots: Tensor
) -> Tensor:
    if cos_sin is not None:
        rotary = cos_sin.index_select(0, positions).unsqueeze(1)
        cos, sin = rotary.chunk(2, dim=-1)
        q = rotate(q, cos, sin, interleaved)
        k = rotate(k, cos, sin, interleaved)
    store(cache.keys, k, slots, cache.key_scale)
    if cache.values is not None:
        store(cache.values, v, slots, cache.value_scale)
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] with its first 2 × cos.shape[-1] features rotated; cos and sin are [T, 1, dim / 2] float32."""
    half = cos.shape[-1]
    wide = x[..., : 2 * half].float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    out = out.to(x.dtype)
    return out if 2 * half == x.shape[-1] else torch.cat((out, x[..., 2 * half :]), dim=-1)


def store(pages: Tensor, x: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Write x [T, kv_heads, D] to pages [blocks, kv_heads, block_size, D] at `slots`; negative slots are dropped."""
    block_size = pages.shape[2]
    if scale is not None:
        x = quantize(x.float() / scale[:, None], pages.dtype)
    slots = slots.long()
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        slots, x = slots[kept], x[kept]
    pages[torch.div(slots, block_size, rounding_mode="floor"), :, slots % block_size] = x.to(pages.dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest value of int8 or float8_e4m3fn, clamped to its range."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)
