"""Random paged batches, in which everything unused is poisoned, and attention over them in float64, key by key."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.core.forward_batch import NO_TREE, ForwardBatch, KVCache, TreeMask
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.types import MEAN_TOKENS, AttentionParams

PADDING_SLOT = 10**7  # of rows that no kernel computes
NO_BLOCK = 10**9  # reading through this entry leaves the process's memory
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖. NaN or infinity anywhere makes it NaN, which is not below any bound."""
    expected = expected.double()
    return float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(batch: ForwardBatch, padding: int) -> ForwardBatch:
    """The batch as a captured step has it: followed by rows of padding, with the numbers of decodes and of rows on the device."""

    def extended(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.cat((x, x.new_zeros(padding, *x.shape[1:])))

    return replace(
        batch,
        query_starts=torch.cat((batch.query_starts, batch.query_starts[-1:].expand(padding))),
        seq_lens=extended(batch.seq_lens),
        block_tables=extended(batch.block_tables),
        prefix_lens=extended(batch.prefix_lens),
        state_slots=None
        if batch.state_slots is None
        else torch.cat((batch.state_slots, batch.state_slots.new_full((padding,), PADDING_SLOT))),
        num_decodes=0,
        decode_count=int32([batch.num_decodes]),
        row_count=int32([batch.num_rows]),
    )


@dataclass
class Case:
    """One step: `rows` of (queries, keys), the decode rows first."""

    rows: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    value_size: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    latent: bool = False  # MLA: the keys are the values
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mean: bool = False  # keys are stored less one, which is larger than what is left
    prefix_lens: list[int] | None = None
    padding_tokens: int = 0
    trees: dict[int, list[int]] | None = None  # by row: the parents of the last keys of a row, of which the last ones are its queries

    def build(self) -> tuple[Tensor, KVCache, ForwardBatch, AttentionParams]:
        blocks_each = [-(-keys // self.block_size) for _, keys in self.rows]
        order = (torch.randperm(sum(blocks_each) + 3)).tolist()
        table = torch.full((len(self.rows), max(blocks_each) + 2), NO_BLOCK, dtype=torch.int32)
        for row, count in enumerate(blocks_each):
            table[row, :count] = int32([order.pop() for _ in range(count)])
        keys, key_scale = self._pages(table, blocks_each, self.size)
        values, value_scale = (None, None) if self.latent else self._pages(table, blocks_each, self.value_size or self.size)
        self._forget_before_window(table)
        starts = torch.tensor([0] + [n for n, _ in self.rows]).cumsum(0).int()
        tokens = int(starts[-1]) + self.padding_tokens
        decodes = next((i for i, (n, _) in enumerate(self.rows) if n != 1), len(self.rows))
        fused = torch.full((tokens, self.heads * self.size + 32), float("nan"), dtype=self.dtype)
        q = fused[:, 16 : 16 + self.heads * self.size].view(tokens, self.heads, self.size)
        q[:] = torch.randn(q.shape).to(self.dtype)
        zeros, masks = torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
        lens = int32([keys for _, keys in self.rows])
        batch = ForwardBatch(
            zeros, zeros, zeros, starts, lens, table, decodes, max(n for n, _ in self.rows), int(lens.max()) + 7,
            prefix_lens=None if self.prefix_lens is None else int32(self.prefix_lens),
        )  # fmt: skip
        if self.trees is not None:
            batch.positions, batch.tree = zeros.clone(), TreeMask(masks, torch.full((len(self.rows),), NO_TREE, dtype=torch.int32))
            for row, parents in self.trees.items():
                (queries, length), end = self.rows[row], int(starts[row + 1])
                batch.tree.starts[row] = length - len(parents)
                paths: list[set[int]] = []
                for node, parent in enumerate(parents):
                    paths.append({node} | (paths[parent] if parent >= 0 else set()))
                for i, path in enumerate(paths[-queries:]):
                    masks[end - queries + i] = sum(1 << node if node < 63 else -(1 << 63) for node in path)
                    batch.positions[end - queries + i] = length - len(parents) + len(path) - 1
        params = AttentionParams(
            self.size**-0.5, self.window, self.chunk, self.softcap,
            torch.rand(self.heads) if self.alibi else None, torch.randn(self.heads) if self.sinks else None,
        )  # fmt: skip
        means = torch.randn(self.kv_heads, -(-int(lens.max()) // MEAN_TOKENS), self.size) * 3 if self.mean else None
        return q, KVCache(keys, values, key_scale, value_scale, key_mean=means), batch, params

    def _pages(self, table: Tensor, blocks_each: list[int], size: int) -> tuple[Tensor, Tensor | None]:
        dtype = self.cache_dtype or self.dtype
        shape = (sum(blocks_each) + 3, self.kv_heads, self.block_size, size)
        if dtype == torch.int8:
            pages, poison, scale = torch.randint(-127, 128, shape, dtype=torch.int8), 127, torch.rand(self.kv_heads) * 0.02 + 0.01
        else:
            scale = torch.rand(self.kv_heads) + 0.5 if dtype == torch.float8_e4m3fn else None
            pages, poison = torch.randn(shape).to(dtype), float("nan")
        used = torch.zeros(shape[0], self.block_size, dtype=torch.bool)
        for row, (_, keys) in enumerate(self.rows):
            for i in range(blocks_each[row]):
                used[int(table[row, i]), : keys - i * self.block_size] = True
        unused = ~used[:, None, :, None].expand(shape)
        if dtype == torch.float8_e4m3fn:
            pages.view(torch.int8)[unused] = 127  # NaN
        else:
            pages[unused] = poison
        return pages, scale

    def _forget_before_window(self, table: Tensor) -> None:
        """Blocks that no query of the row can see any more may belong to other sequences."""
        if self.window is not None:
            for row, (queries, keys) in enumerate(self.rows):
                table[row, : max(0, keys - queries - self.window + 1) // self.block_size] = NO_BLOCK


def expected_attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Every query against every key it sees, one at a time."""
    heads, kv_heads, block_size = q.shape[1], cache.keys.shape[1], cache.block_size
    real = [_real(cache.keys, cache.key_scale)]
    real.append(real[0] if cache.values is None else _real(cache.values, cache.value_scale))
    out = []
    for row in range(batch.num_rows):
        first, last, length = int(batch.query_starts[row]), int(batch.query_starts[row + 1]), int(batch.seq_lens[row])
        for token in range(first, last):
            position = length - (last - token)
            start, mask = length, 0  # the keys from `start` on are those of a tree
            if batch.tree is not None and int(batch.tree.starts[row]) != NO_TREE:
                start, mask, position = int(batch.tree.starts[row]), int(batch.tree.masks[token]), int(batch.positions[token])
            prefix = 0 if batch.prefix_lens is None else int(batch.prefix_lens[row])
            seen = [k for k in range(length) if (_sees(position, k, prefix, params) if k < start else mask >> (k - start) & 1)]
            keys_seen = torch.tensor(seen)
            blocks, offsets = batch.block_tables[row, keys_seen // block_size].long(), keys_seen % block_size
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                keys, values = (pages[blocks, kv_head, offsets] for pages in real)
                keys = keys + _subtracted_mean(cache, kv_head, keys_seen)
                scores = keys @ q[token, head].double() * params.scale
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if params.alibi_slopes is not None:
                    scores = scores + params.alibi_slopes[head].double() * (keys_seen - position)
                if params.sinks is not None:
                    scores = torch.cat((scores, params.sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: len(seen)]
                out.append(weights @ values)
    return torch.stack(out).view(-1, heads * out[0].shape[0])


def _real(pages: Tensor, scale: Tensor | None) -> Tensor:
    return pages.double() if scale is None else pages.double() * scale.double()[None, :, None, None]


def _subtracted_mean(cache: KVCache, kv_head: int, positions: Tensor) -> Tensor | float:
    """[keys, D]: the mean that was subtracted from a head's keys before they were stored; none from a sequence's first key."""
    if cache.key_mean is None or cache.key_scale is None:
        return 0.0
    means = cache.key_mean[kv_head, positions // MEAN_TOKENS].double() * (positions > 0)[:, None]
    return means * cache.key_scale[kv_head].double()


def _sees(query: int, key: int, prefix: int, params: AttentionParams) -> bool:
    seen = key <= query or key < prefix
    if params.window is not None:
        seen = seen and key > query - params.window
    if params.chunk is not None:
        seen = seen and key // params.chunk == query // params.chunk
    return seen


FP4_SCALES = ("e8m0", "e4m3")


def fp4_expert_of_every_scale(scale: str) -> tuple[PackedWeight, Tensor]:
    """(one expert in FP4, its values in float64 [1, n, 64]): all values with every scale that the layout `quads` holds.

    e8m0: powers of two from 2 ** -127 to 2, in groups of 32. e4m3: all positive numbers, in groups of 16.
    """
    if scale == "e8m0":
        scales = torch.arange(-127, 2).double().exp2()
    else:
        scales = torch.arange(127).byte().view(torch.float8_e4m3fn).double()
    scales = torch.cat((scales, scales[: len(scales) % 2]))  # rows in pairs
    group = 32 if scale == "e8m0" else 16
    codes = torch.stack([torch.cat([torch.randperm(16) for _ in range(4)]) for _ in scales])
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.where(codes >= 8, -magnitudes[codes % 8], magnitudes[codes % 8]) * scales[:, None]
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).byte()
    row_scale = torch.ones(1, len(scales)) if scale == "e4m3" else None
    stored = scales.bfloat16()[None, :, None].repeat(1, 1, 64 // group)
    return PackedWeight("int4", packed[None], stored, None, group, is_fp4=True, row_scale=row_scale), values[None]
