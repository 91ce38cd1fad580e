"""The paged KV cache of a layer as arguments of the C kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.kernels.native.library import ABSENT, FLOAT32, INT8, TensorInfo, tensor_info

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


class NativePages(NamedTuple):
    """The tensors of a paged cache as the kernels read them.

    `keys` and `values` are [num_blocks, kv_heads, block_size, size]. Only int8 caches have the scales, float32 [kv_heads], and optionally
    the balance of the keys, float32 [kv_heads, 2, size]; in other caches these are ABSENT.
    """

    keys: TensorInfo
    values: TensorInfo
    key_scale: TensorInfo
    value_scale: TensorInfo
    key_balance: TensorInfo


def native_pages(cache: KVCache, dtype: int) -> NativePages | None:
    """The arguments for the kernels, or None for a cache that they do not support.

    They read caches of the activations' `dtype` (a code of `library`), and int8 caches with scales and without key means.
    """
    if cache.values is None or cache.key_mean is not None or dtype < 0:
        return None
    pages = NativePages(*map(tensor_info, (cache.keys, cache.values, cache.key_scale, cache.value_scale, cache.key_balance)))
    keys, values, *scales, balance = pages
    if keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3]:
        return None
    if keys.dtype == dtype:
        return pages if scales == [ABSENT, ABSENT] and balance is ABSENT else None
    _, kv_heads, _, size = keys.shape
    fits = keys.dtype == INT8 and all(scale.dtype == FLOAT32 and scale.shape == (kv_heads,) for scale in scales)
    fits = fits and (balance is ABSENT or (balance.dtype == FLOAT32 and balance.shape == (kv_heads, 2, size)))
    return pages if fits else None
