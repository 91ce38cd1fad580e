"""The paged KV cache of one layer as kernels receive it.

A block of the cache holds `block_size` consecutive tokens of one sequence. Row r of the block table lists the blocks of sequence r:

    block_tables[r] = [7, 2, 9, ...]        token t of the sequence is in block block_tables[r][t // block_size],
                                            at place t % block_size
    keys [num_blocks, kv_heads, block_size, size]

      block 7:  head 0 | token 0: size values | token 1 | ... | token block_size - 1 |   a head's page: dense
                head 1 | token 0              | token 1 | ...                        |
                  ...   (stride_key_head apart; blocks are stride_key_block apart)

Values are stored likewise with `value_size` features. A latent cache (MLA) has no values: the keys are the values too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from torch import Tensor

from stoker.kernels.types import MEAN_TOKENS

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


class KVPages(NamedTuple):
    """Pointers and strides (in elements) of one layer's cache. None: absent."""

    keys_ptr: Tensor  # [num_blocks, kv_heads, block_size, size]: the queries' dtype, int8 or float8_e4m3fn
    values_ptr: Tensor | None  # [num_blocks, kv_heads, block_size, value_size]; None: the keys are the values
    key_scale_ptr: Tensor | None  # float32 [kv_heads]: the real value per stored unit
    value_scale_ptr: Tensor | None  # float32 [kv_heads]
    key_mean_ptr: Tensor | None  # float32 [kv_heads, max_positions / MEAN_TOKENS, size]: subtracted from keys before they were stored
    stride_key_block: int
    stride_key_head: int
    stride_value_block: int
    stride_value_head: int
    stride_mean_head: int


def kv_pages(cache: KVCache) -> KVPages:
    """The pointers and strides of `cache` as a kernel argument."""
    keys, values, mean = cache.keys, cache.values, cache.key_mean
    return KVPages(
        keys,
        values,
        cache.key_scale,
        cache.key_scale if values is None else cache.value_scale,
        mean,
        keys.stride(0),
        keys.stride(1),
        0 if values is None else values.stride(0),
        0 if values is None else values.stride(1),
        0 if mean is None else mean.stride(0),
    )


@triton.constexpr_function
def mean_tokens():
    """The number of consecutive positions that share one row of `key_mean_ptr`. Constexpr."""
    return MEAN_TOKENS


def require_dense_pages(cache: KVCache) -> None:
    """Raise ValueError unless each head's page of a block is block_size × head_size dense values, as the kernels address it."""
    for name, pages in (("keys", cache.keys), ("values", cache.values)):
        if pages is not None and pages.stride()[2:] != (pages.shape[3], 1):
            raise ValueError(f"cache {name} have strides {pages.stride()}; each head's page must be dense: make the cache contiguous")
