"""A layer's paged cache as the kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.kernels.native.library import FLOAT32, INT8, NOTHING, Known, known

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


class Pages(NamedTuple):
    """keys and values [num_blocks, kv_heads, block_size, size]; of int8 ones scales float32 [kv_heads], and perhaps the balance of keys,
    float32 [kv_heads, 2, size]; else NOTHING."""

    keys: Known
    values: Known
    key_scale: Known
    value_scale: Known
    key_balance: Known


def pages_of(cache: KVCache, dtype: int) -> Pages | None:
    """None where the kernels do not read it: they read values of the stream's `dtype`, or int8 with scales and no means of keys."""
    if cache.values is None or cache.key_mean is not None or dtype < 0:
        return None
    pages = Pages(*map(known, (cache.keys, cache.values, cache.key_scale, cache.value_scale, cache.key_balance)))
    keys, values, *scales, balance = pages
    if keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3]:
        return None
    if keys.dtype == dtype:
        return pages if scales == [NOTHING, NOTHING] and balance is NOTHING else None
    _, kv_heads, _, size = keys.shape
    fits = keys.dtype == INT8 and all(scale.dtype == FLOAT32 and scale.shape == (kv_heads,) for scale in scales)
    fits = fits and (balance is NOTHING or (balance.dtype == FLOAT32 and balance.shape == (kv_heads, 2, size)))
    return pages if fits else None
