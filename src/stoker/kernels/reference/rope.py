"""Rotary positions (arXiv 2104.09864) and the write into the paged cache, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stoker.kernels.types import MEAN_TOKENS

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor | None, interleaved: bool, cache: KVCache, slots: Tensor
) -> Tensor:
    if cos_sin is not None:
        rotary = cos_sin.index_select(0, positions)
        both = _joined(q, k)
        if both is None:
            q, k = _turned(q, rotary, interleaved), _turned(k, rotary, interleaved)
        else:
            q, k = _turned(both, rotary, interleaved).split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    if cache.key_balance is not None:
        of_keys, of_queries = cache.key_balance.unbind(1)
        dim = 0 if cos_sin is None else cos_sin.shape[1]
        q = spread(q * of_queries.repeat_interleave(q.shape[1] // k.shape[1], dim=0), dim, interleaved).to(q.dtype)
        k = spread(k * of_keys, dim, interleaved)
    if cache.key_mean is not None:
        k = k.float() - missing(cache, positions)
    where = places(slots, cache.block_size)
    store(cache.keys, k, where, cache.key_scale)
    if cache.values is not None:
        store(cache.values, v, where, cache.value_scale)
    return q


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """[T, heads + kv_heads, D] when k's heads follow q's in memory, as they leave a fused linear: they are rotated in one go."""
    follows = k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1) and k.stride() == q.stride()
    if not (follows and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] with its first 2 × cos.shape[-1] features rotated; cos and sin are [T, 1, dim / 2] float32."""
    return _turned(x, torch.cat((cos, sin), dim=-1), interleaved)


def _turned(x: Tensor, rotary: Tensor, interleaved: bool) -> Tensor:
    """The same by rows of the table, [T, dim]: dim / 2 cosines, then as many sines."""
    dim = rotary.shape[-1]
    wide = (x if dim == x.shape[-1] else x[..., :dim]).float()
    pairs = in_pairs(wide, interleaved)
    # One product for all four: [T, heads, by cosines or sines, first or second of a pair, dim / 2].
    turned, crossed = (pairs.unsqueeze(2) * rotary.view(-1, 1, 2, 1, dim // 2)).unbind(2)
    first, second = turned.unbind(2)
    first_crossed, second_crossed = crossed.unbind(2)
    first.sub_(second_crossed)
    second.add_(first_crossed)
    out = in_features(turned, interleaved).to(x.dtype)
    return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)


def in_pairs(x: Tensor, interleaved: bool) -> Tensor:
    """x [..., dim] as [..., first or second of a pair, dim / 2], of features that rotate together."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))


def in_features(pairs: Tensor, interleaved: bool) -> Tensor:
    """The other way round."""
    return (pairs.transpose(-1, -2) if interleaved else pairs).flatten(-2)


def spread(x: Tensor, dim: int, interleaved: bool) -> Tensor:
    """x [..., D] in coordinates in which no feature stands out, float32: times a Hadamard matrix, which is orthonormal and its own inverse.

    Pairs of the first `dim` features, those that rotate together, become their sums and differences. Then these, those and the features
    that do not rotate go each through `hadamard` by themselves. Products of two vectors stay what they were (QuaRot, arXiv 2404.00456).
    """
    first, second = in_pairs(x[..., :dim].float(), interleaved).unbind(-2)
    pairs = hadamard(torch.stack((first + second, first - second), dim=-2)) * 0.5**0.5
    return torch.cat((in_features(pairs, interleaved), hadamard(x[..., dim:].float())), dim=-1)


def missing(cache: KVCache, positions: Tensor) -> Tensor:
    """float32 [T, kv_heads, D]: what keys at `positions` are stored less of, in their coordinates and not in units of the scale."""
    assert cache.key_mean is not None and cache.key_scale is not None
    means = cache.key_mean[:, positions // MEAN_TOKENS].transpose(0, 1)
    return torch.where((positions > 0)[:, None, None], means * cache.key_scale[:, None], 0.0)


def hadamard(x: Tensor) -> Tensor:
    """Rows of x [..., n] in blocks of the largest power of two that divides n, each times Sylvester's orthonormal matrix."""
    size, step = twos(x.shape[-1]), 1
    while step < size:
        first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x * size**-0.5


def twos(size: int) -> int:
    """The largest power of two that divides it; 1 of nothing."""
    return max(size & -size, 1)


class Places(NamedTuple):
    """Where tokens go in the cache: block and offset of each that is kept, numbers for a single one; `kept` when some are not."""

    block: Tensor | int
    offset: Tensor | int
    kept: Tensor | None


def places(slots: Tensor, block_size: int) -> Places | None:
    """Of slots [T]: negative ones are dropped. None when all are."""
    if slots.numel() == 1:
        slot = int(slots)
        return Places(*divmod(slot, block_size), None) if slot >= 0 else None
    slots = slots.long()
    kept = slots >= 0
    if bool(kept.all()):
        return Places(torch.div(slots, block_size, rounding_mode="floor"), slots % block_size, None)
    slots = slots[kept]
    return Places(torch.div(slots, block_size, rounding_mode="floor"), slots % block_size, kept)


def store(pages: Tensor, x: Tensor, where: Places | None, scale: Tensor | None) -> None:
    """Write x [T, kv_heads, D] to pages [blocks, kv_heads, block_size, D]."""
    if where is None:
        return
    if scale is not None:
        x = quantize(x.float() / scale[:, None], pages.dtype)
    if isinstance(where.block, int):
        pages[where.block, :, where.offset] = x[0]  # a fourth of the general write's time
        return
    x = x if where.kept is None else x[where.kept]
    pages[where.block, :, where.offset] = x.to(pages.dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest value of int8 or float8_e4m3fn, clamped to its range."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)
