"""Keys that an 8-bit cache holds with less loss: no feature stands out of the others.

In a language model a few features of keys are large and hardly vary: three bits of mantissa, or one scale a head, round mostly these. So
keys are multiplied feature by feature, and queries divided, until both are as large in every feature, and then both go through one
orthonormal matrix that makes of each feature a bit of all (`hadamard_transform`). Their products stay as they are, at every
distance, and what rounding adds to them is the least that coordinates can do. Features that rotate together have one factor.

e4m3 rounds by the size of a number, and most of a key is what all keys have in common before they rotate. So keys are stored less that
mean, rotated as it is on average over their MEAN_TOKENS positions, and attention adds each query's product with it: exact at every
distance again. A sequence's first key is small, and most queries attend to it: it is stored as it is, or it would be rounded by the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig
from stoker.kernels.reference.rope import from_pairs, hadamard_transform, rotate, to_pairs
from stoker.kernels.types import MEAN_TOKENS, supports_key_mean

WINDOWS = 4  # of calibration, that the balance and the mean are found by


def has_mean(attention: AttentionConfig, kv_cache: str) -> bool:
    """Whether keys are stored less their mean.

    int8's steps depend little on it, and on two axes no place tells how its key turned. Kernels add it in heads of one part, which are
    powers of two up to MAX_MEAN_HEAD_SIZE.
    """
    return kv_cache == "float8_e4m3fn" and supports_key_mean(attention.head_size) and not (attention.rope and attention.rope.two_axes)


def rotated_means(mean: Tensor, table: Tensor | None, positions: int, interleaved: bool) -> Tensor:
    """float32 [means, kv_heads, D]: the mean [kv_heads, D] as it is on average over each MEAN_TOKENS of so many positions.

    `table` [positions or more, dim]: their cosines, then their sines; None: nothing rotates.
    """
    count = -(-positions // MEAN_TOKENS)
    means = mean.float().expand(count, *mean.shape)
    if table is None:
        return means
    cos, sin = torch.stack([part.mean(0) for part in table.split(MEAN_TOKENS)])[:count, None].chunk(2, dim=-1)
    return rotate(means, cos, sin, interleaved)


def stored_means(found: dict[str, Tensor], attention: AttentionConfig, table: Tensor | None, positions: int) -> Tensor:
    """`KVCache.key_mean` [kv_heads, means, D] for so many positions, of `CacheStats.tensors`.

    In bfloat16's precision: queries of 16 bits are multiplied by the very numbers that keys are stored less of.
    """
    dim, interleaved = rotation(attention)
    means = rotated_means(found["key_mean"], table, positions, interleaved) * found["key_balance"][:, 0]
    units = hadamard_transform(means, dim, interleaved) / found["key_scale"].clamp(min=1e-30)[:, None]
    return units.transpose(0, 1).bfloat16().float().contiguous()


def rotation(attention: AttentionConfig) -> tuple[int, bool]:
    """(how many features rotate, whether pairs of them are neighbours)."""
    return (attention.rope.dim, attention.rope.interleaved) if attention.rope else (0, False)


class KeyStats:
    """How large a layer's queries and keys are, head by head; with `less_mean`, keys less their mean.

    `table`: the rotary rows of the windows' positions, which begin at 0, and of the rest of MEAN_TOKENS; None: nothing rotates.
    """

    def __init__(self, attention: AttentionConfig, table: Tensor | None = None, less_mean: bool = False) -> None:
        self.dim, self.interleaved = rotation(attention)
        self.table, self.less_mean = table, less_mean
        self._first: list[tuple[Tensor, Tensor]] = []  # until there is a balance
        self._balance: Tensor | None = None
        self._mean: Tensor | None = None
        self._largest: Tensor | None = None

    def add(self, queries: Tensor, keys: Tensor) -> None:
        """A window's queries [T, heads, D] and keys [T, kv_heads, D] as attention multiplies them, in the coordinates of the model."""
        if self._balance is not None:
            self._measure(keys)
            return
        self._first.append((queries, keys))
        if len(self._first) == WINDOWS:
            self.balance()

    def balance(self) -> Tensor:
        """float32 [kv_heads, 2, D]: what keys, and the queries that see them, are multiplied by."""
        if self._balance is None:
            if self.less_mean:
                self._mean = torch.cat([self._back(window) for _, window in self._first]).mean(0)
            queries = torch.cat([window for window, _ in self._first]).float()
            keys = torch.cat([self._less(window) for _, window in self._first])
            groups = queries.unflatten(1, (keys.shape[1], -1))
            sizes = torch.stack((groups.square().mean((0, 2)), keys.square().mean(0)))
            wanted, there = self._together(sizes / sizes.mean(-1, keepdim=True)).clamp(min=1e-4)
            factors = (wanted / there) ** 0.25
            self._balance = torch.stack((factors, 1 / factors), dim=1).cpu()
            for _, window in self._first:
                self._measure(window)
            self._first.clear()
        return self._balance

    def mean(self) -> Tensor:
        """float32 [kv_heads, D]: the mean of keys before they rotate, in the coordinates of the model."""
        self.balance()
        assert self._mean is not None
        return self._mean.cpu()

    def largest(self) -> Tensor:
        """float32 [kv_heads]: the largest magnitude that is stored."""
        self.balance()
        assert self._largest is not None
        return self._largest

    def _measure(self, keys: Tensor) -> None:
        assert self._balance is not None
        stored = hadamard_transform(self._less(keys) * self._balance[:, 0].to(keys.device), self.dim, self.interleaved)
        found = stored.abs().amax((0, 2)).cpu()
        self._largest = found if self._largest is None else torch.maximum(self._largest, found)

    def _back(self, keys: Tensor) -> Tensor:
        """A window's keys as they were before they rotated, float32."""
        if self.table is None:
            return keys.float()
        cos, sin = self.table[: len(keys), None].chunk(2, dim=-1)
        length = cos.square() + sin.square()  # some methods stretch what they rotate
        return rotate(keys.float(), cos / length, -sin / length, self.interleaved)

    def _less(self, keys: Tensor) -> Tensor:
        """A window's keys as they are stored before they are balanced and spread, float32."""
        keys = keys.float()
        if self._mean is None:
            return keys
        means = rotated_means(self._mean, self.table, len(keys), self.interleaved).repeat_interleave(MEAN_TOKENS, dim=0)[: len(keys)]
        return torch.cat((keys[:1], keys[1:] - means[1:]))

    def _together(self, sizes: Tensor) -> Tensor:
        """Of sizes [..., D]: the mean of the two features that rotate together, for both."""
        turning, rest = sizes.split((self.dim, sizes.shape[-1] - self.dim), dim=-1)
        pairs = to_pairs(turning, self.interleaved)
        means = pairs.mean(-2, keepdim=True).expand_as(pairs)
        return torch.cat((from_pairs(means, self.interleaved), rest), dim=-1)
