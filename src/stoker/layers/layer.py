"""Decoder layers: one small class per layout of norms, blocks and adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.layers.attention import Attention
from stoker.layers.batch import ForwardBatch, KVCache
from stoker.layers.config import AttentionConfig, LayerConfig, MLAConfig, MLPConfig, MoEConfig, RopeConfig
from stoker.layers.loader import Loader
from stoker.layers.mla import MLA
from stoker.layers.mlp import MLP
from stoker.layers.moe import MoE
from stoker.layers.norm import Norm
from stoker.layers.rope import rope_table

# One row per kind of block.
MIXERS: dict[type, Any] = {AttentionConfig: Attention, MLAConfig: MLA}
FEED_FORWARDS: dict[type, Any] = {MLPConfig: MLP, MoEConfig: MoE}

# What a layer returns: its last block's output, and the stream it is still to be added to (None: it was added).
Stream = tuple[Tensor, Tensor | None]


class RopeTables:
    """Layers with equal rotary settings share one table."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self.device = device
        self._tables: dict[RopeConfig, Tensor] = {}

    def get(self, config: RopeConfig | None) -> Tensor | None:
        if config is None:
            return None
        if config not in self._tables:
            self._tables[config] = rope_table(config, self.num_positions, self.device)
        return self._tables[config]


class Layer:
    """Base of the layouts. The residual travels beside the activations, so that an add is fused with the norm that follows it."""

    def __init__(self, config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> None:
        attention, mlp = config.attention, config.mlp
        self.attention = MIXERS[type(attention)](attention, loader, f"{name}.attention", hidden, tables.get(attention.rope))
        self.mlp = FEED_FORWARDS[type(mlp)](mlp, loader, f"{name}.mlp", hidden)
        self.residual_scale = config.residual_scale
        self.skip_scale = config.skip_scale
        for norm in self.norms(config):
            setattr(self, norm, Norm(config.norm, loader, f"{name}.{norm}", hidden))

    attention_norm: Norm
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp_post_norm: Norm

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        """The names of the layer's norms."""
        raise TypeError("a layout names its norms")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        raise TypeError("a layout runs its blocks")

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class PreNorm(Layer):
    """norm → block → add, twice (GPT-2, Llama)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        x, residual = (self.attention_norm(x), x) if residual is None else self.attention_norm.add(x, residual)
        x = self._scaled(self.attention(x, batch, cache))
        x, residual = self.mlp_norm.add(x, residual)
        return self._scaled(self.mlp(x)), residual


class Sandwich(Layer):
    """norm → block → norm → add, twice (Gemma 2)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        x, residual = (self.attention_norm(x), x) if residual is None else self.attention_norm.add(x, residual)
        x = self.attention_post_norm(self.attention(x, batch, cache))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp_post_norm(self.mlp(x)), residual


class PostNorm(Layer):
    """block → norm → add, twice (OLMo 2)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_post_norm", "mlp_post_norm")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        x = x + self.attention_post_norm(self.attention(x, batch, cache))
        return x + self.mlp_post_norm(self.mlp(x)), None


class AddNorm(Layer):
    """norm → block → add to the *normed* stream × skip_scale, twice (ChatGLM 1); the stream is what comes out."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        x = self.attention_norm(x)
        x = x * self.skip_scale + self.attention(x, batch, cache)
        x = self.mlp_norm(x)
        return x * self.skip_scale + self.mlp(x), None


class NormLast(Layer):
    """block → add → norm, twice (the first transformers, OPT-350m)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        x, _ = self.attention_norm.add(self.attention(x, batch, cache), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x, None


class Parallel(Layer):
    """Attention and MLP read the same stream and are added together (GPT-J, Falcon, Command-R)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm", "mlp_norm")[: config.parallel_norms]

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch, cache: KVCache) -> Stream:
        normed, residual = (self.attention_norm(x), x) if residual is None else self.attention_norm.add(x, residual)
        mlp_norm = getattr(self, "mlp_norm", None)
        mlp_input = normed if mlp_norm is None else mlp_norm(residual)
        return self.attention(normed, batch, cache) + self.mlp(mlp_input), residual


LAYOUTS: dict[str, type[Layer]] = {
    "pre": PreNorm,
    "sandwich": Sandwich,
    "post": PostNorm,
    "add_norm": AddNorm,
    "last": NormLast,
    "parallel": Parallel,
}


def make_layer(config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> Layer:
    return LAYOUTS[config.layout](config, loader, name, hidden, tables)
