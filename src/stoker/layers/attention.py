"""The attention block: fused QKV projection, norms of queries and keys, attention over the paged KV cache, output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, QueryScaleConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, AttentionParams, Rotary
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm
from stoker.layers.qk_norm import head_norms, norm_specs, qk_norm
from stoker.layers.rope import step_table
from stoker.layers.shard import num_local_kv_heads, query_heads


class Attention:
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, config: AttentionConfig, loader: Loader, name: str, hidden: int, cos_sin: Tensor | None) -> None:
        self.config = config
        weights = loader.load(self.specs(config, name, hidden))
        self.qkv, self.out, self.gate = weights["qkv"], weights["out"], weights.get("gate")
        self.attend, self.group = loader.attention, loader.group
        self.num_heads = len(_heads(config, loader))
        self.num_kv_heads = num_local_kv_heads(config.num_kv_heads, loader.sharding.size)
        self.head_size = config.head_size
        self.cos_sin = cos_sin
        self.interleaved = config.rope.interleaved if config.rope else False
        self.two_axes = config.rope.two_axes if config.rope else False
        self.qk_norm = qk_norm(config, loader, name)
        self.head_norms = head_norms(config, loader, name)
        self.params = AttentionParams(
            scale=config.scale if config.scale is not None else config.head_size**-0.5,
            window=config.window,
            chunk=config.chunk,
            softcap=config.softcap,
            alibi_slopes=_alibi(config, loader) if config.alibi else None,
            sinks=weights.get("sinks"),
        )

    @staticmethod
    def specs(config: AttentionConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of the block's linears and biases, without its norms. Keys are the attributes that load them."""
        size = config.head_size
        kv_heads = config.num_kv_heads
        q, kv = config.num_heads * size, kv_heads * size
        specs: dict[str, Spec] = {
            "qkv": LinearSpec(
                name=f"{name}.qkv",
                in_features=hidden,
                parts=(q, kv, kv) if config.kv_layer is None else (q,),
                bias=config.qkv_bias,
                split="heads",
                head_size=size,
                num_kv_heads=0 if config.kv_layer is None else kv_heads,
            ),
            "out": LinearSpec(
                name=f"{name}.out",
                in_features=q,
                parts=(hidden,),
                bias=config.out_bias,
                split="row_heads",
                head_size=size,
                num_kv_heads=kv_heads,
            ),
        }
        if config.out_gate:
            specs["gate"] = LinearSpec(
                name=f"{name}.gate",
                in_features=hidden,
                parts=(q,),
                bias=config.qkv_bias,
                split="heads",
                head_size=size,
                num_kv_heads=kv_heads,
            )
        if config.sinks:
            specs["sinks"] = TensorSpec(
                name=f"{name}.sinks", shape=(config.num_heads,), split="heads", num_kv_heads=kv_heads, dtype="float32"
            )
        return specs

    @staticmethod
    def all_specs(config: AttentionConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block, including the norms of queries and keys."""
        specs = Attention.specs(config, name, hidden)
        for key in ("q_norm", "k_norm") if config.kv_layer is None else ("q_norm",):
            specs |= {f"{key}.{part}": spec for part, spec in norm_specs(config, f"{name}.{key}").items()}
        return specs

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """attention(norm(x)) + residual, [T, hidden], summed over ranks. Stores the keys and values of the step in `cache`."""
        fusion = PLAIN if norm is None else norm.fusion
        heads = self.attend_heads(self.qkv(x, fusion), batch, cache, self.params)
        if self.gate is not None:
            heads = heads * torch.sigmoid(self.gate(x, fusion))
        return linear_all_reduce(self.out, heads, self.group, residual)

    def attend_heads(self, qkv: Tensor, batch: ForwardBatch, cache: KVCache, params: AttentionParams) -> Tensor:
        """Attention of this rank's heads before the output projection: [T, heads × head_size]. Stores keys and values in `cache`.

        `qkv` is the output of the QKV linear. `params` is `self.params`, or the variant for steps with fused layers.
        """
        config = self.config
        size = self.head_size
        if config.clip_qkv is not None:
            qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
        heads = qkv.view(qkv.shape[0], -1, size)
        if config.kv_layer is not None:
            return self._attend_shared(heads, batch, cache, params)
        q, k, v = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        positions, cos_sin = batch.positions, self.cos_sin
        if config.qk_norm_after_rope and cos_sin is not None:
            rotated = ops.rotate_heads(heads[:, : self.num_heads + self.num_kv_heads], positions, cos_sin, self.interleaved)
            q, k = rotated.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
            cos_sin = None
        if self.qk_norm is not None:
            q, k = self._normalize(q, k)
        if config.v_norm is not None:
            v = ops.norm(v, None, None, config.v_norm.eps, config.v_norm.kind)
        if self.two_axes and cos_sin is not None:
            positions, cos_sin = step_table(cos_sin, batch)
        if config.logn_length is not None:
            q = q * _logn(batch.positions, config.logn_length).to(q.dtype)
        if config.query_scale is not None:
            q = q * _query_scale(batch.positions, config.query_scale).to(q.dtype)
        return self.attend(q, k, v, Rotary(positions, cos_sin, self.interleaved, self.head_norms), cache, batch, params)

    def _attend_shared(self, q: Tensor, batch: ForwardBatch, cache: KVCache, params: AttentionParams) -> Tensor:
        """Attention of q [T, heads, head_size] over the cache of another layer, which has stored the keys and values of this step."""
        unused = q.new_zeros(q.shape[0], self.num_kv_heads, self.head_size)
        if self.qk_norm is not None:
            q, _ = self.qk_norm(q, unused)
        nowhere = torch.full_like(batch.slots, -1)
        rotary = Rotary(batch.positions, self.cos_sin, self.interleaved, self.head_norms)
        q = ops.rope_store(q, unused, unused, rotary, cache, nowhere)
        return ops.attention(q, cache, batch, params)

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [T, heads, head_size] after the norm of queries and keys."""
        assert self.qk_norm is not None
        if not self.config.qk_norm_full:
            return self.qk_norm(q, k)
        full = self.qk_norm(q.flatten(1), k.flatten(1))
        return full[0].view(q.shape), full[1].view(k.shape)


def _logn(positions: Tensor, length: int) -> Tensor:
    """[T, 1, 1]: the factors of queries in Qwen 1, the logarithm of position + 1 to the base `length`, at least 1."""
    return (torch.log(positions.float() + 1) / math.log(length)).clamp(min=1.0)[:, None, None]


def _query_scale(positions: Tensor, config: QueryScaleConfig) -> Tensor:
    """float32 [T, 1, 1]: the factors of queries in Llama 4 and Ministral 3 (`QueryScaleConfig`)."""
    intervals = torch.floor((positions.float() + config.offset) / config.interval)
    return (1 + config.beta * torch.log1p(intervals))[:, None, None]


def _alibi(config: AttentionConfig, loader: Loader) -> Tensor:
    """float32 [heads]: the ALiBi slopes of this rank's query heads; 0 for heads of zeros."""
    slopes = (alibi_slopes(config.num_heads, config.alibi_max) * config.alibi_scale).tolist()
    return torch.tensor([0.0 if head is None else slopes[head] for head in _heads(config, loader)], device=loader.device)


def _heads(config: AttentionConfig, loader: Loader) -> list[int | None]:
    """The query heads of this rank; None stands for a head of zeros."""
    return query_heads(config.num_heads, config.num_kv_heads, loader.sharding.size, loader.group.rank)


def alibi_slopes(num_heads: int, max_exponent: float = 8.0) -> Tensor:
    """float32 [num_heads]: 2 ** (-8 i / n) for the largest power of two n, then the odd steps of the next power (arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-max_exponent * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-max_exponent / 2 * i / power) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)
