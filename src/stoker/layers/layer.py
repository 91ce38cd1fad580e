"""Decoder layers: one class for each layout of norms, blocks and residual additions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, LayerConfig, MLAConfig, MLPConfig, MoEConfig, RopeConfig
from stoker.layers.attention import Attention
from stoker.layers.loader import Loader
from stoker.layers.mla import MLA
from stoker.layers.mlp import MLP
from stoker.layers.moe import MoE
from stoker.layers.norm import Norm
from stoker.layers.rope import rope_table

# The block for each type of config.
MIXERS: dict[type, Any] = {AttentionConfig: Attention, MLAConfig: MLA}
FEED_FORWARDS: dict[type, Any] = {MLPConfig: MLP, MoEConfig: MoE}


class RopeTables:
    """The rotary tables of a model. Layers with equal settings share one."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self.device = device
        self._tables: dict[RopeConfig, Tensor] = {}

    def get(self, config: RopeConfig | None) -> Tensor | None:
        """The table for a config, computed at the first call, or None for a model without rotary embedding."""
        if config is None:
            return None
        if config not in self._tables:
            self._tables[config] = rope_table(config, self.num_positions, self.device)
        return self._tables[config]


class Layer:
    """Base of the layouts. Blocks receive the norm before them and the residual after them, and fuse both into their linears."""

    def __init__(self, config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> None:
        attention, mlp = config.attention, config.mlp
        self.attention = MIXERS[type(attention)](attention, loader, f"{name}.attention", hidden, tables.get(attention.rope))
        self.mlp = FEED_FORWARDS[type(mlp)](mlp, loader, f"{name}.mlp", hidden)
        self.residual_scale = config.residual_scale
        self.skip_scale = config.skip_scale
        self.has_mlp_norm = "mlp_norm" in self.norms(config)
        for norm in self.norms(config):
            setattr(self, norm, Norm(config.norm, loader, f"{name}.{norm}", hidden))

    # Norms of this layer, as `norms` names them.
    attention_norm: Norm
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp_post_norm: Norm

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        """The names of the norms that this layout has, which are attributes and parts of weight names."""
        raise TypeError("a layout must name its norms")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The residual stream [T, hidden] after this layer."""
        raise TypeError("a layout must run its blocks")


class PreNorm(Layer):
    """norm → block → add, twice (GPT-2, Llama)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        scale = self.residual_scale
        if scale == 1.0:
            x = self.attention(x, batch, cache, self.attention_norm, x)
            return self.mlp(x, self.mlp_norm, x)
        x = x + self.attention(x, batch, cache, self.attention_norm) * scale
        return x + self.mlp(x, self.mlp_norm) * scale


class Sandwich(Layer):
    """norm → block → norm → add, twice (Gemma 2)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        x = x + self.attention_post_norm(self.attention(x, batch, cache, self.attention_norm))
        return x + self.mlp_post_norm(self.mlp(x, self.mlp_norm))


class PostNorm(Layer):
    """block → norm → add, twice (OLMo 2)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_post_norm", "mlp_post_norm")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        x = x + self.attention_post_norm(self.attention(x, batch, cache))
        return x + self.mlp_post_norm(self.mlp(x))


class AddNorm(Layer):
    """norm → block → add to skip_scale × the output of the norm, twice (ChatGLM 1)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        x = self.attention_norm(x)
        x = self.attention(x, batch, cache, residual=x * self.skip_scale)
        x = self.mlp_norm(x)
        return self.mlp(x, residual=x * self.skip_scale)


class NormLast(Layer):
    """block → add → norm, twice (the first transformers, OPT-350m)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        x = self.attention_norm(self.attention(x, batch, cache, residual=x))
        return self.mlp_norm(self.mlp(x, residual=x))


class Parallel(Layer):
    """Attention and MLP have the same input, and both outputs are added to it (GPT-J, Falcon, Command-R)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")[: config.parallel_norms]

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        if self.has_mlp_norm:
            return self.mlp(x, self.mlp_norm, self.attention(x, batch, cache, self.attention_norm, x))
        normalized = self.attention_norm(x)
        return self.mlp(normalized, None, self.attention(normalized, batch, cache, residual=x))


LAYOUTS: dict[str, type[Layer]] = {
    "pre": PreNorm,
    "sandwich": Sandwich,
    "post": PostNorm,
    "add_norm": AddNorm,
    "last": NormLast,
    "parallel": Parallel,
}


def make_layer(config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> Layer:
    """The layer of the layout that `config` names, with its weights loaded. `name` is the prefix of weight names."""
    return LAYOUTS[config.layout](config, loader, name, hidden, tables)
