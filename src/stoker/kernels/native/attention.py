"""Paged attention of decode rows by the C kernel (attention.c)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.kernels.native.library import ATTENTION, INT32, kernels, tensor_info
from stoker.kernels.native.linear import ACTIVATION_DTYPES
from stoker.kernels.native.pages import native_pages
from stoker.kernels.reference import attention as reference
from stoker.kernels.types import AttentionParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Paged attention (`ops.attention`) by the C kernel for decode steps that it supports, otherwise by the reference."""
    out = _decode(q, cache, batch, params) if batch.num_decodes == q.shape[0] else None
    return reference.attention(q, cache, batch, params) if out is None else out


def _decode(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor | None:
    """Attention [R, heads × Dv] of R rows with one query each, or None when the kernel does not support the arguments."""
    library, dtype = kernels(), ACTIVATION_DTYPES.get(q.dtype, -1)
    pages, tables, lens = native_pages(cache, dtype), tensor_info(batch.block_tables), tensor_info(batch.seq_lens)
    if isinstance(library, str) or pages is None or not _is_supported(params):
        return None
    (rows, heads, size), stride, value_size = q.shape, q.stride(), pages.values.shape[3]
    num_blocks, kv_heads, block_size, key_size = pages.keys.shape
    if size != key_size or stride[2] != 1 or tables.dtype != INT32 or lens.dtype != INT32 or not lens.numel == tables.shape[0] == rows:
        return None
    out = torch.empty(rows, heads * value_size, dtype=q.dtype)
    status = library.attention(
        ATTENTION(
            library.fork,
            torch.get_num_threads(),
            q.data_ptr(),
            pages.keys.address,
            pages.values.address,
            pages.key_scale.address,
            pages.value_scale.address,
            tables.address,
            lens.address,
            out.data_ptr(),
            rows,
            heads,
            kv_heads,
            size,
            value_size,
            stride[0],
            stride[1],
            tables.shape[1],
            num_blocks,
            block_size,
            params.window or 0,
            params.chunk or 0,
            dtype,
            pages.keys.dtype,
            params.scale,
        )
    )
    return None if status else out


def _is_supported(params: AttentionParams) -> bool:
    """Whether the kernel implements the options: it has no soft cap, ALiBi slopes or attention sinks."""
    return params.softcap is None and params.alibi_slopes is None and params.sinks is None
