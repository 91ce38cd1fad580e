"""A layer's paged cache as the kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.kernels.native.library import FLOAT32, INT8, NOTHING, Known, known

if TYPE_CHECKING:
    from stoker.layers.batch import KVCache


class Pages(NamedTuple):
    """keys and values [num_blocks, kv_heads, block_size, size]; scales float32 [kv_heads] of int8 ones, else NOTHING."""

    keys: Known
    values: Known
    key_scale: Known
    value_scale: Known


def pages_of(cache: KVCache, dtype: int) -> Pages | None:
    """None where the kernels do not read it: they read values of the stream's `dtype`, or int8 with scales."""
    if cache.values is None or dtype < 0:
        return None
    pages = Pages(known(cache.keys), known(cache.values), known(cache.key_scale), known(cache.value_scale))
    keys, values, *scales = pages
    if keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3]:
        return None
    if keys.dtype == dtype:
        return pages if scales == [NOTHING, NOTHING] else None
    fits = keys.dtype == INT8 and all(scale.dtype == FLOAT32 and scale.shape == keys.shape[1:2] for scale in scales)
    return pages if fits else None
