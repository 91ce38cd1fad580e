"""Norms of queries and keys: per head, per head with separate weights, or over all heads, which may be on several ranks.

RMS norms per head with the same weights for all heads (Qwen3, Gemma 3) are part of the kernels that rotate queries and keys (`head_norms`).
The other norms are ops of their own (`qk_norm`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.model_config import AttentionConfig, NormConfig
from stoker.core.specs import Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import HeadNorms
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm
from stoker.layers.shard import kv_copies

# (queries, keys) → the same after the norm. [T, heads × head_size] for norms over all heads, otherwise [T, heads, head_size].
QKNorm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def head_norms(config: AttentionConfig, loader: Loader, name: str) -> HeadNorms | None:
    """The norms of queries and keys that are computed as they are rotated, or None if there are none. Without k_norm in a shared cache."""
    if config.qk_norm is None or not _is_rotated_next(config):
        return None
    keys = ("q_norm", "k_norm") if config.kv_layer is None else ("q_norm",)
    weights = [Norm(config.qk_norm, loader, f"{name}.{key}", config.head_size).weight for key in keys]
    return HeadNorms(weights[0], weights[1] if len(weights) > 1 else None, config.qk_norm.eps)


def _is_rotated_next(config: AttentionConfig) -> bool:
    """Whether the norms of queries and keys are RMS norms per head, and nothing is computed between them and the rotation."""
    assert config.qk_norm is not None
    is_plain = config.qk_norm.kind == "rms" and not config.qk_norm.bias and not (config.qk_norm_heads or config.qk_norm_full)
    return is_plain and config.logn_length is None and config.query_scale is None


def qk_norm(config: AttentionConfig, loader: Loader, name: str) -> QKNorm | None:
    """A function (q, k) → (q, k) that normalizes queries and keys, or None if the config has no such norm or `head_norms` are those."""
    if config.qk_norm is None or _is_rotated_next(config):
        return None
    if config.kv_layer is not None:
        return _pair(Norm(config.qk_norm, loader, f"{name}.q_norm", config.head_size), lambda k: k)
    if config.qk_norm_heads:
        return _pair(HeadNorm(config, loader, f"{name}.q_norm"), HeadNorm(config, loader, f"{name}.k_norm"))
    if config.qk_norm_full and loader.sharding.size > 1:
        return ShardedNorm(config, config.qk_norm, loader, name)
    q_size, k_size = (config.num_heads, config.num_kv_heads) if config.qk_norm_full else (1, 1)
    size = config.head_size
    norms = [Norm(config.qk_norm, loader, f"{name}.{key}", n * size) for key, n in (("q_norm", q_size), ("k_norm", k_size))]
    return _pair(norms[0], norms[1])


def norm_specs(config: AttentionConfig, name: str) -> dict[str, Spec]:
    """The specs of the weights of one of the two norms. `name` ends in q_norm or k_norm. Empty without norms."""
    norm, size = config.qk_norm, config.head_size
    if norm is None:
        return {}
    if not (config.qk_norm_heads or config.qk_norm_full):
        return Norm.specs(norm, name, size)
    kv_heads, wide = config.num_kv_heads, "float32" if norm.wide else None
    name = f"{name}.weight"
    if name.endswith("k_norm.weight"):
        return {"weight": TensorSpec(name=name, shape=(kv_heads * size,), split="kv_heads", head_size=size, dtype=wide)}
    shape = (config.num_heads * size,)
    return {"weight": TensorSpec(name=name, shape=shape, split="heads", head_size=size, num_kv_heads=kv_heads, dtype=wide)}


def _pair(q_norm: Callable[[Tensor], Tensor], k_norm: Callable[[Tensor], Tensor]) -> QKNorm:
    """Combine a norm of queries and a norm of keys into one function (q, k) → (q, k)."""
    return lambda q, k: (q_norm(q), k_norm(k))


class HeadNorm:
    """A norm over the features of each head, with separate weights [heads, head_size] (Command-R+)."""

    def __init__(self, config: AttentionConfig, loader: Loader, name: str) -> None:
        assert config.qk_norm is not None
        self.weight = loader.load(norm_specs(config, name))["weight"]
        self.config = config.qk_norm

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, head_size], normalized over the last axis."""
        return ops.norm(x, None, None, self.config.eps, self.config.kind) * self.weight.view(x.shape[-2:])


class ShardedNorm:
    """RMS norms over all heads of several ranks (OLMo 2). One all-reduce sums the squares of queries and keys."""

    def __init__(self, config: AttentionConfig, norm: NormConfig, loader: Loader, name: str) -> None:
        if norm.kind != "rms" or norm.bias:
            raise ConfigError(
                f"{name}: a {norm.kind} norm over the heads of several ranks is not supported.", cure="Use tensor_parallel 1."
            )
        self.weights = [loader.load(norm_specs(config, f"{name}.{key}"))["weight"] for key in ("q_norm", "k_norm")]
        self.group, self.eps = loader.group, norm.eps
        # A key head of which several ranks hold copies is summed once per copy.
        copies = kv_copies(config.num_kv_heads, loader.sharding.size)
        sizes = (config.num_heads * config.head_size, config.num_kv_heads * config.head_size * copies)
        self.counts = torch.tensor(sizes, dtype=torch.float32, device=loader.device)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, each [T, this rank's heads × head_size], normalized over the heads of all ranks."""
        wide = [x.float() for x in (q, k)]
        sums = ops.all_reduce(torch.stack([x.square().sum(-1) for x in wide], dim=-1), self.group)
        factors = (sums / self.counts + self.eps).rsqrt().split(1, dim=-1)
        out = [(x * factor * weight.float()).to(q.dtype) for x, factor, weight in zip(wide, factors, self.weights, strict=True)]
        return out[0], out[1]
