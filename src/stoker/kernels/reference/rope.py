"""Rotary position embedding (arXiv 2104.09864) and the write into the paged KV cache, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stoker.kernels.reference.norm import norm
from stoker.kernels.types import MEAN_TOKENS, Rotary

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


def rope_store(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, slots: Tensor) -> Tensor:
    """Normalize and rotate q and k, store k and v in the cache, and return q (`ops.rope_store`)."""
    positions, cos_sin, interleaved, norms = rotary
    if norms is not None:
        q, k = (norm(x, weight, None, norms.eps, "rms") for x, weight in ((q, norms.q_weight), (k, norms.k_weight)))
    if cos_sin is not None:
        cos_sin_rows = cos_sin.index_select(0, positions)
        qk = _fused_view(q, k)
        if qk is None:
            q, k = _rotate_by_rows(q, cos_sin_rows, interleaved), _rotate_by_rows(k, cos_sin_rows, interleaved)
        else:
            q, k = _rotate_by_rows(qk, cos_sin_rows, interleaved).split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    if cache.key_balance is not None:
        key_factors, query_factors = cache.key_balance.unbind(1)
        dim = 0 if cos_sin is None else cos_sin.shape[1]
        q = hadamard_transform(q * query_factors.repeat_interleave(q.shape[1] // k.shape[1], dim=0), dim, interleaved).to(q.dtype)
        k = hadamard_transform(k * key_factors, dim, interleaved)
    if cache.key_mean is not None:
        k = k.float() - subtracted_mean(cache, positions)
    places = cache_places(slots, cache.block_size)
    store_pages(cache.keys, k, places, cache.key_scale)
    if cache.values is not None:
        store_pages(cache.values, v, places, cache.value_scale)
    return q


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """x rotated by its positions (`ops.rotate_heads`)."""
    return _rotate_by_rows(x, cos_sin.index_select(0, positions), interleaved)


def _fused_view(q: Tensor, k: Tensor) -> Tensor | None:
    """A view [T, heads + kv_heads, D] over q and k if k's heads follow q's in memory, as in the output of a fused linear; else None."""
    follows = k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1) and k.stride() == q.stride()
    if not (follows and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] with the first `dim` features rotated. cos and sin are float32 [T, 1, dim / 2]."""
    return _rotate_by_rows(x, torch.cat((cos, sin), dim=-1), interleaved)


def _rotate_by_rows(x: Tensor, cos_sin_rows: Tensor, interleaved: bool) -> Tensor:
    """`rotate` by rows of the rotary table, [T, dim]: dim / 2 cosines, then dim / 2 sines."""
    dim = cos_sin_rows.shape[-1]
    wide = (x if dim == x.shape[-1] else x[..., :dim]).float()
    pairs = to_pairs(wide, interleaved)
    # All four products at once: [T, heads, cosine or sine, first or second of the pair, dim / 2].
    by_cos, by_sin = (pairs.unsqueeze(2) * cos_sin_rows.view(-1, 1, 2, 1, dim // 2)).unbind(2)
    first, second = by_cos.unbind(2)
    first_by_sin, second_by_sin = by_sin.unbind(2)
    first.sub_(second_by_sin)
    second.add_(first_by_sin)
    out = from_pairs(by_cos, interleaved).to(x.dtype)
    return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)


def to_pairs(x: Tensor, interleaved: bool) -> Tensor:
    """x [..., dim] as [..., 2, dim / 2]: the first and the second features of the pairs that rotate together.

    Pairs are (0, 1), (2, 3), … if interleaved, else (i, i + dim / 2).
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))


def from_pairs(pairs: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `to_pairs`: [..., 2, dim / 2] → [..., dim]."""
    return (pairs.transpose(-1, -2) if interleaved else pairs).flatten(-2)


def hadamard_transform(x: Tensor, dim: int, interleaved: bool) -> Tensor:
    """x [..., D] after an orthonormal transform that spreads outliers over all features, float32.

    The transform is its own inverse, and products of two transformed vectors are unchanged (QuaRot, arXiv 2404.00456).

    The pairs of the first `dim` features, which rotate together, become their sums and differences. Then `hadamard_blocks` transforms three
    vectors separately: the sums, the differences, and the features that do not rotate.
    """
    first, second = to_pairs(x[..., :dim].float(), interleaved).unbind(-2)
    pairs = hadamard_blocks(torch.stack((first + second, first - second), dim=-2)) * 0.5**0.5
    return torch.cat((from_pairs(pairs, interleaved), hadamard_blocks(x[..., dim:].float())), dim=-1)


def hadamard_blocks(x: Tensor) -> Tensor:
    """x [..., n] times Sylvester's orthonormal Hadamard matrix, in blocks of the largest power of two that divides n."""
    size, step = power_of_2_divisor(x.shape[-1]), 1
    while step < size:
        first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x * size**-0.5


def power_of_2_divisor(n: int) -> int:
    """The largest power of two that divides n; 1 for 0."""
    return max(n & -n, 1)


def subtracted_mean(cache: KVCache, positions: Tensor) -> Tensor:
    """float32 [T, kv_heads, D]: the mean that is subtracted from the keys at `positions` [T] before they are stored; 0 at position 0."""
    assert cache.key_mean is not None and cache.key_scale is not None
    means = cache.key_mean[:, positions // MEAN_TOKENS].transpose(0, 1)
    return torch.where((positions > 0)[:, None, None], means * cache.key_scale[:, None], 0.0)


class CachePlaces(NamedTuple):
    """The block and the offset in it at which each token of a step is stored: plain integers when the step has one token."""

    block: Tensor | int
    offset: Tensor | int
    is_stored: Tensor | None  # bool [T]: False for padding; None: all tokens are stored


def cache_places(slots: Tensor, block_size: int) -> CachePlaces | None:
    """The places of `slots` [T]. Negative slots (padding) are left out. None when all are negative."""
    if slots.numel() == 1:
        slot = int(slots)
        return CachePlaces(*divmod(slot, block_size), None) if slot >= 0 else None
    slots = slots.long()
    is_stored = slots >= 0
    if bool(is_stored.all()):
        return CachePlaces(torch.div(slots, block_size, rounding_mode="floor"), slots % block_size, None)
    slots = slots[is_stored]
    return CachePlaces(torch.div(slots, block_size, rounding_mode="floor"), slots % block_size, is_stored)


def store_pages(pages: Tensor, x: Tensor, places: CachePlaces | None, scale: Tensor | None) -> None:
    """Write x [T, kv_heads, D] to pages [blocks, kv_heads, block_size, D], quantized by `scale` [kv_heads] if there is one."""
    if places is None:
        return
    if scale is not None:
        x = quantize(x.float() / scale[:, None], pages.dtype)
    if isinstance(places.block, int):
        pages[places.block, :, places.offset] = x[0]  # a quarter of the time of the general assignment
        return
    x = x if places.is_stored is None else x[places.is_stored]
    pages[places.block, :, places.offset] = x.to(pages.dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to the nearest value of int8 or float8_e4m3fn, clamped to its range."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)
