"""Keys that an 8-bit cache holds with less loss: pairs of features are turned and scaled, the queries' the other way round.

Two features that rotary positions rotate together are one complex number. A key's times z and a query's divided by the conjugate of z have
the product they had, at every distance, so that the rows of the projection can be multiplied once and for all. On SmolLM2 perplexity grows
by 0.9 % then with a cache in e4m3 and by 1.5 % without; in int8 by 0.2 and 0.4 %.
"""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from stoker.layers.config import AttentionConfig
from stoker.quant.calibration import unit_of

ROWS = 128  # of a window that the search looks at
ANGLES = 8  # tried of a quarter turn: a whole one swaps the features
SCALES = 8  # tried of a factor of 2, for e4m3: what a power of two changes is only the exponent


def pairs(attention: AttentionConfig) -> Tensor | None:
    """int64 [head_size / 2, 2]: features of a head that turn together. None where scores would not stay as they are."""
    rope, size = attention.rope, attention.head_size
    if attention.qk_norm is not None or attention.clip_qkv is not None or size % 2 or (rope is not None and rope.two_axes):
        return None
    rotated = 0 if rope is None or rope.interleaved else rope.dim
    halves = torch.arange(rotated).view(2, -1).t()
    return torch.cat((halves, torch.arange(rotated, size).view(-1, 2)))


class QueryKeys:
    """Some of the queries and keys of a layer, as attention multiplies them. `table`: cosines and sines of `rope_table`, if they turn."""

    def __init__(self, attention: AttentionConfig, table: Tensor | None) -> None:
        self.attention, self.table = attention, table
        self._found: list[Tensor] = []

    def add(self, qkv: Tensor) -> None:
        """The projection's output [T, ...] of one window, from its first token on."""
        config, together, every = self.attention, pairs(self.attention), -(-len(qkv) // ROWS)
        assert together is not None
        heads = qkv[::every].unflatten(1, (-1, config.head_size))[:, : config.num_heads + config.num_kv_heads].float()
        found = torch.view_as_complex(heads[..., together].contiguous())
        if self.table is not None:
            angles = torch.complex(*self.table[: len(qkv) : every, None].chunk(2, dim=-1))
            found[..., : angles.shape[-1]] *= angles
        self._found.append(found)

    def factors(self, kv_cache: str) -> Tensor:
        """complex64 [kv_heads, pairs]: what the pairs of a key are to be multiplied by."""
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        queries, keys = torch.cat(self._found).split((heads, kv_heads), dim=1)
        groups = queries.unflatten(1, (kv_heads, -1)).unbind(1)
        return torch.stack([search(key, query.flatten(0, 1), kv_cache) for key, query in zip(keys.unbind(1), groups, strict=True)])


def search(keys: Tensor, queries: Tensor, kv_cache: str) -> Tensor:
    """complex64 [pairs]: of the factors tried, those with which rounded `keys` [T, pairs] leave the least squared error of the scores.

    An error that all keys share changes no softmax, and does not count. `queries` [Q, pairs].
    """
    moments = _moments(queries)
    best, found = moments.new_full(keys.shape[1:], torch.inf), torch.ones_like(keys[0])
    for step in range(ANGLES):
        turn = cmath.rect(1.0, math.pi / 2 * step / ANGLES)
        turned = keys * turn
        for scale in _scales(turned, kv_cache):
            wrong = _rounded(turned * scale, kv_cache) / (scale * turn) - keys
            error = (_moments(wrong - wrong.mean(0)) * moments).sum((1, 2))
            found = torch.where(error < best, scale * turn, found)
            best = torch.minimum(error, best)
    return found / found.abs().log2().mean().round().exp2()


def turn(qkv: Tensor, attention: AttentionConfig, factors: Tensor) -> None:
    """Multiply the keys' rows of a projection's weight [out, in] or bias [out] by `factors`, in place, and divide the queries'."""
    together = pairs(attention)
    assert together is not None
    heads = qkv.view(-1, attention.head_size, *qkv.shape[1:])
    groups = attention.num_heads // attention.num_kv_heads
    by = torch.cat(((1 / factors.conj()).repeat_interleave(groups, dim=0), factors))
    by = by.view(*by.shape, *[1] * (qkv.dim() - 1))
    first, second = (heads[: len(by), features].float() for features in together.t())
    heads[: len(by), together[:, 0]] = (first * by.real - second * by.imag).to(qkv.dtype)
    heads[: len(by), together[:, 1]] = (first * by.imag + second * by.real).to(qkv.dtype)


def _moments(values: Tensor) -> Tensor:
    """float32 [pairs, 2, 2]: the mean of x xᵀ over complex rows [n, pairs]."""
    parts = torch.view_as_real(values)
    return torch.einsum("tpi,tpj->pij", parts, parts) / len(parts)


def _scales(keys: Tensor, kv_cache: str) -> list[Tensor]:
    """Scales [pairs] or [] to try. int8 has one: all the way to equal sizes leaves no room for larger keys, so that it goes half way."""
    if kv_cache == "int8":
        return [torch.view_as_real(keys).abs().amax((0, 2)).clamp(min=1e-6).rsqrt()]
    return [torch.tensor(2 ** (step / SCALES - 0.5), device=keys.device) for step in range(SCALES)]


def _rounded(keys: Tensor, kv_cache: str) -> Tensor:
    parts = torch.view_as_real(keys)
    unit = unit_of(parts.abs().amax(), kv_cache)
    codes = (parts / unit).round() if kv_cache == "int8" else (parts / unit).to(torch.float8_e4m3fn).float()
    return torch.view_as_complex(codes * unit)
