"""Keys that an 8-bit cache holds with less loss: no feature stands out of the others.

In a language model a few features of keys are large and hardly vary: three bits of mantissa, or one scale a head, round mostly these. So
keys are multiplied feature by feature, and queries divided, until both are as large in every feature, and then both go through one
orthonormal matrix that makes of each feature a bit of all (`kernels.reference.rope.spread`). Their products stay as they are, at every
distance, and what rounding adds to them is the least that coordinates can do. Features that rotate together have one factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.reference.rope import in_features, in_pairs, spread
from stoker.layers.config import AttentionConfig

WINDOWS = 4  # of calibration, that the balance is found by


class KeyStats:
    """How large a layer's queries and keys are, head by head."""

    def __init__(self, attention: AttentionConfig) -> None:
        self.dim, self.interleaved = (attention.rope.dim, attention.rope.interleaved) if attention.rope else (0, False)
        self._first: list[tuple[Tensor, Tensor]] = []  # until there is a balance
        self._balance: Tensor | None = None
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
            queries, keys = (torch.cat(parts).float() for parts in zip(*self._first, strict=True))
            groups = queries.unflatten(1, (keys.shape[1], -1))
            sizes = torch.stack((groups.square().mean((0, 2)), keys.square().mean(0)))
            wanted, there = self._together(sizes / sizes.mean(-1, keepdim=True)).clamp(min=1e-4)
            factors = (wanted / there) ** 0.25
            self._balance = torch.stack((factors, 1 / factors), dim=1).cpu()
            for _, window in self._first:
                self._measure(window)
            self._first.clear()
        return self._balance

    def largest(self) -> Tensor:
        """float32 [kv_heads]: the largest magnitude that is stored."""
        self.balance()
        assert self._largest is not None
        return self._largest

    def _measure(self, keys: Tensor) -> None:
        assert self._balance is not None
        stored = spread(keys * self._balance[:, 0].to(keys.device), self.dim, self.interleaved)
        found = stored.abs().amax((0, 2)).cpu()
        self._largest = found if self._largest is None else torch.maximum(self._largest, found)

    def _together(self, sizes: Tensor) -> Tensor:
        """Of sizes [..., D]: the mean of the two features that rotate together, for both."""
        turning, rest = sizes.split((self.dim, sizes.shape[-1] - self.dim), dim=-1)
        pairs = in_pairs(turning, self.interleaved)
        means = pairs.mean(-2, keepdim=True).expand_as(pairs)
        return torch.cat((in_features(means, self.interleaved), rest), dim=-1)
