"""Paged attention by the C kernels: decode rows and rows with draft trees (attention.c), other rows (prefill.c)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stoker.core.forward_batch import NO_TREE, TreeMask
from stoker.kernels.native.library import ATTENTION, INT32, PREFILL, kernels, tensor_info
from stoker.kernels.native.linear import ACTIVATION_DTYPES
from stoker.kernels.native.pages import native_pages
from stoker.kernels.reference import attention as reference
from stoker.kernels.reference.attention import step_value
from stoker.kernels.types import AttentionParams

MAX_TREE_QUERIES = 64  # queries of a row in a step with trees; the reference computes longer prefills beside trees

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Paged attention (`ops.attention`) by the C kernels for steps that they support, otherwise by the reference.

    The kernel of decode steps computes each query by itself, and therefore serves steps with draft trees whose rows are short, too.
    """
    out = None
    if batch.num_decodes == q.shape[0] or (batch.tree is not None and batch.max_query_len <= MAX_TREE_QUERIES):
        out = _attend(q, cache, batch, params)
    elif batch.tree is None and batch.prefix_lens is None:
        out = _prefill(q, cache, batch, params)
    return reference.attention(q, cache, batch, params) if out is None else out


class _Queries(NamedTuple):
    """The queries of a step as arguments of the kernel: int32 [Q], and int64 [Q] for `masks`. None for decode rows."""

    lengths: Tensor  # the keys up to that of the query
    tables: Tensor | None = None  # the row of the block table
    ends: Tensor | None = None  # the position of the query + 1
    tree_starts: Tensor | None = None  # the position of the first key of the tree
    masks: Tensor | None = None  # the keys of the tree to which the query attends


def _queries(batch: ForwardBatch, tree: TreeMask) -> _Queries:
    """The queries of a step with trees."""
    starts = batch.query_starts.long()
    tables = torch.arange(batch.num_rows).repeat_interleave(starts.diff())
    lengths = batch.seq_lens[tables] - starts[1:][tables] + torch.arange(len(tables)) + 1
    tree_starts = tree.starts[tables]
    ends = torch.where(tree_starts == NO_TREE, lengths, batch.positions[: len(tables)] + 1)
    return _Queries(lengths.int(), tables.int(), ends.int(), tree_starts, tree.masks[: len(tables)].contiguous())


def _attend(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams, out: Tensor | None = None) -> Tensor | None:
    """Attention [Q, heads × Dv] of Q queries, which are the first ones of the step, or None when the kernel does not support the arguments.

    Without draft trees, these are those of the first Q rows, which are decode rows. `out`: a tensor whose first Q rows become the result.
    """
    library, dtype = kernels(), ACTIVATION_DTYPES.get(q.dtype, -1)
    queries = _Queries(batch.seq_lens)
    if (tree := batch.tree) is not None:
        queries = step_value(batch, "queries", lambda: _queries(batch, tree))
    pages, tables, lens = native_pages(cache, dtype), tensor_info(batch.block_tables), tensor_info(queries.lengths)
    if isinstance(library, str) or pages is None or not _is_supported(params):
        return None
    (rows, heads, size), stride, value_size = q.shape, q.stride(), pages.values.shape[3]
    num_blocks, kv_heads, block_size, key_size = pages.keys.shape
    if size != key_size or stride[2] != 1 or tables.dtype != INT32 or lens.dtype != INT32 or lens.numel < rows:
        return None
    if queries.tables is None and tables.shape[0] < rows:
        return None
    out = torch.empty(rows, heads * value_size, dtype=q.dtype) if out is None else out
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
            *(0 if tensor is None else tensor.data_ptr() for tensor in queries[1:]),
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


def _prefill(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor | None:
    """Attention [T, heads × Dv] of a step with prefill rows, or None when the kernel does not support the arguments."""
    library, dtype = kernels(), ACTIVATION_DTYPES.get(q.dtype, -1)
    pages, tables = native_pages(cache, dtype), tensor_info(batch.block_tables)
    if isinstance(library, str) or pages is None or not _is_supported(params) or tables.dtype != INT32:
        return None
    (tokens, heads, size), stride, value_size = q.shape, q.stride(), pages.values.shape[3]
    num_blocks, kv_heads, block_size, key_size = pages.keys.shape
    if size != key_size or stride[2] != 1:
        return None
    out = torch.empty(tokens, heads * value_size, dtype=q.dtype)
    n, lens = batch.num_decodes, tensor_info(batch.seq_lens)
    if lens.dtype != INT32 or (n and _attend(q[:n], cache, batch, params, out) is None):
        return None
    starts = step_value(batch, "starts", batch.query_starts.tolist)
    for row in range(n, batch.num_rows):
        start, queries = starts[row], starts[row + 1] - starts[row]
        if queries and library.prefill(
            PREFILL(
                library.fork,
                torch.get_num_threads(),
                q.data_ptr() + start * stride[0] * q.element_size(),
                pages.keys.address,
                pages.values.address,
                pages.key_scale.address,
                pages.value_scale.address,
                tables.address + row * tables.shape[1] * batch.block_tables.element_size(),
                lens.address + row * batch.seq_lens.element_size(),
                out.data_ptr() + start * heads * value_size * out.element_size(),
                queries,
                heads,
                kv_heads,
                size,
                value_size,
                stride[0],
                stride[1],
                num_blocks,
                block_size,
                params.window or 0,
                params.chunk or 0,
                dtype,
                pages.keys.dtype,
                params.scale,
            )
        ):
            return None
    return out


def _is_supported(params: AttentionParams) -> bool:
    """Whether the kernel implements the options: it has no soft cap, ALiBi slopes or attention sinks."""
    return params.softcap is None and params.alibi_slopes is None and params.sinks is None
