"""Transforms keys so that an 8-bit KV cache rounds them less, while q · k stays the same.

In a language model a few features of the keys are large and hardly vary. With one scale per head, or three mantissa bits, rounding errors
are proportional to these. Therefore keys are multiplied by a *balance* of each feature, and queries divided by it, so that both are equally
large in every feature, and both are then multiplied by one orthonormal matrix that spreads each feature over all others
(`hadamard_transform`). Features that are rotated together have one factor.

e4m3 rounds relative to the magnitude of a number, and keys have a large common part before the rotary embedding. Therefore keys are stored
less their mean, rotated as it is on average over each MEAN_TOKENS positions, and attention adds the product of each query with it. The
first key of a sequence is small and receives most of the attention: it is stored unchanged, because it would be large without the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig
from stoker.kernels.reference.rope import from_pairs, hadamard_transform, rotate, to_pairs
from stoker.kernels.types import MEAN_TOKENS, supports_key_mean

NUM_BALANCE_WINDOWS = 4  # calibration windows from which the balance and the mean are computed


def has_mean(attention: AttentionConfig, kv_cache: str) -> bool:
    """Whether a mean is subtracted from keys before they are stored in a cache of dtype `kv_cache`.

    int8 does not gain from it. With rotary embeddings of two axes, the index of a key does not determine its rotation. Kernels support head
    sizes that are a power of two up to MAX_MEAN_HEAD_SIZE.
    """
    return kv_cache == "float8_e4m3fn" and supports_key_mean(attention.head_size) and not (attention.rope and attention.rope.two_axes)


def rotated_means(mean: Tensor, table: Tensor | None, num_positions: int, interleaved: bool) -> Tensor:
    """float32 [means, kv_heads, D]: the mean [kv_heads, D], rotated by the average rotation of each MEAN_TOKENS consecutive positions.

    `table` [num_positions or more, dim]: cosines, then sines; None: no rotation.
    """
    count = -(-num_positions // MEAN_TOKENS)
    means = mean.float().expand(count, *mean.shape)
    if table is None:
        return means
    cos, sin = torch.stack([part.mean(0) for part in table.split(MEAN_TOKENS)])[:count, None].chunk(2, dim=-1)
    return rotate(means, cos, sin, interleaved)


def stored_means(tensors: dict[str, Tensor], attention: AttentionConfig, table: Tensor | None, num_positions: int) -> Tensor:
    """The field `KVCache.key_mean` [kv_heads, means, D], computed from the tensors of `CacheStats.tensors`.

    It is rounded to bfloat16, so that 16-bit queries are multiplied by exactly what was subtracted from the keys.
    """
    dim, interleaved = rotation(attention)
    means = rotated_means(tensors["key_mean"], table, num_positions, interleaved) * tensors["key_balance"][:, 0]
    units = hadamard_transform(means, dim, interleaved) / tensors["key_scale"].clamp(min=1e-30)[:, None]
    return units.transpose(0, 1).bfloat16().float().contiguous()


def rotation(attention: AttentionConfig) -> tuple[int, bool]:
    """(number of rotated features, whether neighbouring features are rotated together) of an attention block."""
    rope = attention.cached_rope
    return (rope.dim, rope.interleaved) if rope else (0, False)


class KeyStats:
    """Statistics of the magnitudes of a layer's queries and keys for each head; with `less_mean`, of keys minus their mean.

    `table`: the rotary table of the first MEAN_TOKENS positions, where the windows begin; None: no rotation.
    """

    def __init__(self, attention: AttentionConfig, table: Tensor | None = None, less_mean: bool = False) -> None:
        self.dim, self.interleaved = rotation(attention)
        self.table, self.less_mean = table, less_mean
        self._first_windows: list[tuple[Tensor, Tensor]] = []  # until the balance is computed
        self._balance: Tensor | None = None
        self._mean: Tensor | None = None
        self._largest: Tensor | None = None

    def add(self, queries: Tensor, keys: Tensor) -> None:
        """Add one window of T tokens: queries [T, heads, D] and keys [T, kv_heads, D] after the rotary embedding, not transformed."""
        if self._balance is not None:
            self._measure(keys)
            return
        self._first_windows.append((queries, keys))
        if len(self._first_windows) == NUM_BALANCE_WINDOWS:
            self.balance()

    def balance(self) -> Tensor:
        """float32 [kv_heads, 2, D]: the factors of keys, and those of the queries that attend to them. Computed at the first call."""
        if self._balance is None:
            if self.less_mean:
                self._mean = torch.cat([self._unrotated(keys) for _, keys in self._first_windows]).mean(0)
            queries = torch.cat([queries for queries, _ in self._first_windows]).float()
            keys = torch.cat([self._without_mean(keys) for _, keys in self._first_windows])
            groups = queries.unflatten(1, (keys.shape[1], -1))
            sizes = torch.stack((groups.square().mean((0, 2)), keys.square().mean(0)))
            query_sizes, key_sizes = self._pair_means(sizes / sizes.mean(-1, keepdim=True)).clamp(min=1e-4)
            factors = (query_sizes / key_sizes) ** 0.25
            self._balance = torch.stack((factors, 1 / factors), dim=1).cpu()
            for _, keys in self._first_windows:
                self._measure(keys)
            self._first_windows.clear()
        return self._balance

    def mean(self) -> Tensor:
        """float32 [kv_heads, D]: the mean of keys before the rotary embedding."""
        self.balance()
        assert self._mean is not None
        return self._mean.cpu()

    def largest(self) -> Tensor:
        """float32 [kv_heads]: the largest magnitude of keys as they are stored, transformed."""
        self.balance()
        assert self._largest is not None
        return self._largest

    def _measure(self, keys: Tensor) -> None:
        """Update `_largest` with one window of keys."""
        assert self._balance is not None
        stored = hadamard_transform(self._without_mean(keys) * self._balance[:, 0].to(keys.device), self.dim, self.interleaved)
        largest = stored.abs().amax((0, 2)).cpu()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def _unrotated(self, keys: Tensor) -> Tensor:
        """The keys of one window before the rotary embedding, float32."""
        if self.table is None:
            return keys.float()
        cos, sin = self.table[: len(keys), None].chunk(2, dim=-1)
        length = cos.square() + sin.square()  # not 1 with methods that scale the rotated features
        return rotate(keys.float(), cos / length, -sin / length, self.interleaved)

    def _without_mean(self, keys: Tensor) -> Tensor:
        """The keys of one window minus their mean, before balance and transformation, float32."""
        keys = keys.float()
        if self._mean is None:
            return keys
        means = rotated_means(self._mean, self.table, len(keys), self.interleaved).repeat_interleave(MEAN_TOKENS, dim=0)[: len(keys)]
        return torch.cat((keys[:1], keys[1:] - means[1:]))

    def _pair_means(self, sizes: Tensor) -> Tensor:
        """`sizes` [..., D], in which two features that are rotated together both have their mean."""
        rotated, rest = sizes.split((self.dim, sizes.shape[-1] - self.dim), dim=-1)
        pairs = to_pairs(rotated, self.interleaved)
        means = pairs.mean(-2, keepdim=True).expand_as(pairs)
        return torch.cat((from_pairs(means, self.interleaved), rest), dim=-1)
