"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434) with absorbed projections.

Queries are projected into the latent space, so that attention reads the cached latents without expanding them to keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import MLAConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels.types import AttentionParams, Rotary
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm
from stoker.layers.shard import num_local_kv_heads


class MLA:
    """The attention block. All heads share one cached latent and one rotated key part per token, which every rank holds."""

    def __init__(self, config: MLAConfig, loader: Loader, name: str, hidden: int, cos_sin: Tensor | None) -> None:
        assert cos_sin is not None
        self.config, self.cos_sin, self.group, self.attend = config, cos_sin, loader.group, loader.attention
        weights = loader.load(self.specs(config, name, hidden))
        self.down, self.q, self.out = weights["down"], weights["q"], weights["out"]
        self.k_up, self.v_up = weights["k_up"], weights["v_up"]
        self.q_norm = Norm(config.norm, loader, f"{name}.q_norm", config.q_rank) if config.q_rank is not None else None
        self.kv_norm = Norm(config.norm, loader, f"{name}.kv_norm", config.kv_rank)
        self.num_heads = num_local_kv_heads(config.num_heads, loader.sharding.size)
        scale = config.scale if config.scale is not None else (config.nope_size + config.rope_size) ** -0.5
        self.params = AttentionParams(scale, config.window)

    @staticmethod
    def specs(config: MLAConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of the block's linears, without its norms. Keys are the attributes that load them."""
        heads, q_size = config.num_heads, config.nope_size + config.rope_size
        down = (config.kv_rank, config.rope_size) if config.q_rank is None else (config.q_rank, config.kv_rank, config.rope_size)
        q_in = hidden if config.q_rank is None else config.q_rank
        k_up, v_up = (heads, config.nope_size, config.kv_rank), (heads, config.v_size, config.kv_rank)
        return {
            "down": LinearSpec(name=f"{name}.down", in_features=hidden, parts=down, bias=config.down_bias),
            "q": LinearSpec(name=f"{name}.q", in_features=q_in, parts=(heads * q_size,), split="heads", head_size=q_size),
            "k_up": TensorSpec(name=f"{name}.k_up", shape=k_up, split="heads"),
            "v_up": TensorSpec(name=f"{name}.v_up", shape=v_up, split="heads"),
            "out": LinearSpec(
                name=f"{name}.out",
                in_features=heads * config.v_size,
                parts=(hidden,),
                bias=config.out_bias,
                split="row_heads",
                head_size=config.v_size,
            ),
        }

    @staticmethod
    def all_specs(config: MLAConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block, including the norms of its latents."""
        specs = MLA.specs(config, name, hidden)
        for key, size in (("q_norm", config.q_rank), ("kv_norm", config.kv_rank)):
            if size is not None:
                specs |= {f"{key}.{part}": spec for part, spec in Norm.specs(config.norm, f"{name}.{key}", size).items()}
        return specs

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """attention(norm(x)) + residual, [T, hidden], summed over ranks. Stores the latents of the step in `cache`."""
        return linear_all_reduce(self.out, self._attend_heads(x, batch, cache, norm), self.group, residual)

    def _attend_heads(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None) -> Tensor:
        """Attention of this rank's heads, [T, heads × v_size], before the output projection."""
        config = self.config
        x = x if norm is None else norm(x)
        *q_latent, latent, k_rope = self.down(x).split([part for part in (config.q_rank, config.kv_rank, config.rope_size) if part], dim=-1)
        q = self.q(x if self.q_norm is None else self.q_norm(q_latent[0]))
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split((config.nope_size, config.rope_size), dim=-1)
        # q · (k_up × latent) = (q × k_up) · latent, so keys are never expanded.
        q = torch.cat((q_rope, torch.einsum("thn,hnr->thr", q_nope, self.k_up)), dim=-1)
        k = torch.cat((k_rope, self.kv_norm(latent)), dim=-1).unsqueeze(1)
        rotary = Rotary(batch.positions, self.cos_sin, config.rope.interleaved)
        # The cache has no values: attention averages keys, and their latent part is the average of the latents.
        latents = self.attend(q, k, k, rotary, cache, batch, self.params).unflatten(-1, (self.num_heads, -1))[..., config.rope_size :]
        return torch.einsum("thr,hvr->thv", latents, self.v_up).flatten(1)
