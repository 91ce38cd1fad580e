"""Paged attention in plain PyTorch: decode rows in one batch, prefill rows one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.forward_batch import NO_TREE
from stoker.kernels.reference.rope import subtracted_mean
from stoker.kernels.types import AttentionParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

# Scores in memory at a time. For a prompt of 8,192 tokens and 32 heads all scores are 8.6 GB, twice. With chunks of 64 queries, and only
# the keys up to the last query of a chunk, 1,024 queries of 9 heads need 21 ms; with chunks of 512 queries 34 ms.
_MAX_SCORES = 1 << 19


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Paged attention of decode and prefill rows (`ops.attention`). Returns [T, heads × Dv]."""
    num_tokens, num_heads = q.shape[:2]
    n = batch.num_decodes
    if n == num_tokens:
        return _decode(q, cache, batch, params)
    value_size = (cache.values if cache.values is not None else cache.keys).shape[-1]
    out = q.new_empty(num_tokens, num_heads * value_size)
    if n:
        out[:n] = _decode(q[:n], cache, batch, params)
    if n < batch.num_rows:
        starts = step_value(batch, "starts", lambda: batch.query_starts.tolist())
        for row in range(n, batch.num_rows):
            tokens = slice(starts[row], starts[row + 1])
            if tokens.start == tokens.stop:
                continue
            plan = step_value(batch, f"prefill{row}", partial(_RowPlan, batch, slice(row, row + 1), cache.block_size))
            out[tokens] = _attend(q[tokens].unsqueeze(0), cache, plan, params)[0].flatten(1)
    return out


def _decode(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attention of rows with one query each: q [R, heads, D] → [R, heads × Dv]."""
    rows, _, size = q.shape
    plan = step_value(batch, "decode", partial(_RowPlan, batch, slice(0, rows), cache.block_size))
    if cache.values is None or not _is_plain(q, cache, params):
        return _attend(q.unsqueeze(1), cache, plan, params).flatten(1)
    # One PyTorch kernel instead of ten in `_attend`. The query heads of a group are the queries of one KV head.
    keys, values = plan.keys(cache), plan.gather(cache.values, cache.value_scale)
    grouped = q.view(rows, keys.shape[1], -1, size)
    return F.scaled_dot_product_attention(grouped, keys, values, plan.mask(params), scale=params.scale).reshape(rows, -1)


def _is_plain(q: Tensor, cache: KVCache, params: AttentionParams) -> bool:
    """Whether `scaled_dot_product_attention` can compute this call: float32, without soft cap, ALiBi or sinks."""
    stored = cache.keys.dtype if cache.key_scale is None else torch.float32
    return q.dtype == stored == torch.float32 and not _has_score_options(params)


def _has_score_options(params: AttentionParams) -> bool:
    """Whether there is a soft cap, ALiBi or sinks, which `scaled_dot_product_attention` does not support."""
    return not (params.softcap is None and params.alibi_slopes is None and params.sinks is None)


class _RowPlan:
    """What a set of rows shares in all layers of a step: the blocks of their keys, and the keys that each query attends to."""

    def __init__(self, batch: ForwardBatch, rows: slice, block_size: int) -> None:
        self.lens = batch.seq_lens[rows].long()
        longest = int(self.lens.max())
        self.num_keys = longest
        num_blocks = -(-longest // block_size)
        tables = batch.block_tables[rows, :num_blocks].long()
        used = torch.arange(num_blocks) * block_size < self.lens[:, None]
        self.blocks = torch.where(used, tables, 0)  # entries past a row's length are undefined
        starts = batch.query_starts
        self.num_queries = int(starts[rows.start + 1] - starts[rows.start])
        self.query_positions = self.lens[:, None] - self.num_queries + torch.arange(self.num_queries)  # [R, Q]
        self.tree: tuple[Tensor, int] | None = None  # the masks [Q] of the queries of one row, and the position of the first node
        if batch.tree is not None and int(batch.tree.starts[rows.start]) != NO_TREE:
            tokens = slice(int(starts[rows.start]), int(starts[rows.start + 1]))
            self.query_positions = batch.positions[tokens].long().unsqueeze(0)
            self.tree = batch.tree.masks[tokens], int(batch.tree.starts[rows.start])
        self.prefix = None if batch.prefix_lens is None else batch.prefix_lens[rows].long()
        self._gathers: dict[int, Tensor] = {}
        self._masks: dict[tuple, Tensor | None] = {}

    def keys(self, cache: KVCache) -> Tensor:
        """The rows' keys [R, kv_heads, keys, D]. A mean that was subtracted before the keys were stored is added back."""
        keys = self.gather(cache.keys, cache.key_scale)
        return keys if cache.key_mean is None else keys + subtracted_mean(cache, torch.arange(self.num_keys)).transpose(0, 1)

    def gather(self, pages: Tensor, scale: Tensor | None) -> Tensor:
        """The rows' tokens from `pages` as [R, kv_heads, keys, D]. With a `scale` [kv_heads], dequantized to float32."""
        num_blocks, heads, block_size, size = pages.shape
        index = self._gathers.get(heads)
        if index is None:
            index = (self.blocks[:, None, :] * heads + torch.arange(heads)[None, :, None]).flatten()
            self._gathers[heads] = index
        flat = pages.view(num_blocks * heads, block_size * size).index_select(0, index)
        out = flat.view(self.blocks.shape[0], heads, -1, size).narrow(2, 0, self.num_keys)
        return out if scale is None else out.float() * scale[None, :, None, None]

    def num_keys_up_to(self, queries: slice) -> int:
        """The number of keys to which some of these queries attend: all keys for trees and prefix LMs, which are not causal."""
        if self.tree is not None or self.prefix is not None:
            return self.num_keys
        return min(int(self.query_positions[:, queries].max()) + 1, self.num_keys)

    def mask(self, params: AttentionParams) -> Tensor | None:
        """bool [R, 1, Q, keys]: True where a query attends to a key. None when every query attends to every key."""
        key = (params.window, params.chunk)
        if key not in self._masks:
            self._masks[key] = self._make_mask(params.window, params.chunk)
        return self._masks[key]

    def _make_mask(self, window: int | None, chunk: int | None) -> Tensor | None:
        """Compute `mask`: the causal rule and the prefix LM's prompt, limited to a sliding window or to chunks, both in tokens."""
        query = self.query_positions[:, :, None]
        keys = torch.arange(self.num_keys)
        seen = keys <= query
        if self.tree is not None:
            masks, first = self.tree
            bits = masks[:, None] >> (keys - first).clamp(0, 63) & 1
            seen = torch.where(keys < first, seen, bits == 1)
        if self.prefix is not None:
            seen = seen | (keys < self.prefix[:, None, None])
        if window is not None:
            seen = seen & (keys > query - window)
        if chunk is not None:
            seen = seen & (torch.div(keys, chunk, rounding_mode="floor") == torch.div(query, chunk, rounding_mode="floor"))
        seen = seen & (keys < self.lens[:, None, None])
        return None if bool(seen.all()) else seen[:, None]


def _attend(q: Tensor, cache: KVCache, plan: _RowPlan, params: AttentionParams) -> Tensor:
    """Attention of q [R, Q, heads, D] → [R, Q, heads, Dv].

    Queries are processed in chunks, so that at most _MAX_SCORES scores exist at a time, with the keys up to the last query of the chunk.
    Padding without keys has results of 0.
    """
    if not plan.num_keys:
        return q.new_zeros(*q.shape[:3], (cache.values if cache.values is not None else cache.keys).shape[-1])
    wide = torch.float32 if q.dtype != torch.float64 else q.dtype
    keys = plan.keys(cache).to(wide)
    # MLA stores one latent per token: its values are the last features of the keys, which the caller selects.
    values = keys if cache.values is None else plan.gather(cache.values, cache.value_scale).to(wide)
    mask, positions = plan.mask(params), plan.query_positions
    rows, queries, heads, _ = q.shape
    step = max(1, _MAX_SCORES // (rows * heads * plan.num_keys))
    attend = _attend_queries if _has_score_options(params) else _attend_plainly
    if step >= queries:
        return attend(q, keys, values, positions, mask, params)
    outs = []
    for start in range(0, queries, step):
        chunk = slice(start, start + step)
        seen = slice(plan.num_keys_up_to(chunk))
        seen_mask = None if mask is None else mask[:, :, chunk, seen]
        outs.append(attend(q[:, chunk], keys[:, :, seen], values[:, :, seen], positions[:, chunk], seen_mask, params))
    return torch.cat(outs, dim=1)


def _attend_plainly(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """`_attend_queries` for calls without options of the scores, by PyTorch's kernel, which keeps scores in the L2 cache."""
    wide = q.to(keys.dtype).transpose(1, 2)
    out = F.scaled_dot_product_attention(wide, keys, values, mask, scale=params.scale, enable_gqa=True)
    return out.transpose(1, 2).to(q.dtype)


def _attend_queries(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Attention of one chunk of queries → [R, Q, heads, Dv] in the dtype of q.

    q [R, Q, heads, D] at `positions` [R, Q]; keys and values [R, kv_heads, keys, D]; `mask` is a result of `_RowPlan.mask`.
    """
    rows, queries, heads, size = q.shape
    kv_heads, wide = keys.shape[1], keys.dtype
    group = heads // kv_heads
    # [R, kv_heads, group × Q, D]: the query heads of a group share their keys, so one product computes all their scores.
    grouped = q.view(rows, queries, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * queries, size)
    scores = torch.matmul(grouped.to(wide) * params.scale, keys.transpose(-1, -2)).view(rows, kv_heads, group, queries, -1)
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if params.alibi_slopes is not None:
        distance = torch.arange(keys.shape[2]) - positions[:, :, None]
        scores = scores + params.alibi_slopes.view(1, kv_heads, group, 1, 1) * distance[:, None, None].to(wide)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    if params.sinks is not None:
        sink = params.sinks.to(wide).view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, queries, 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.reshape(rows, kv_heads, group * queries, -1), values)
    out = out.view(rows, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)
    return out.to(q.dtype)


T = TypeVar("T")


def step_value(batch: ForwardBatch, key: str, compute: Callable[[], T]) -> T:
    """The value of `compute()`, which is called once per step: layers share the value through `batch.shared[key]`."""
    if key not in batch.shared:
        batch.shared[key] = compute()
    return cast(T, batch.shared[key])
