"""Decoder layers: one class for each layout of norms, blocks and residual additions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import (
    AttentionConfig,
    BranchScales,
    DeltaNetConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
)
from stoker.core.specs import Spec
from stoker.layers.altup import AltUpLayer
from stoker.layers.attention import Attention
from stoker.layers.delta_net import DeltaNet
from stoker.layers.loader import Loader
from stoker.layers.mamba1 import Mamba1
from stoker.layers.mamba2 import Mamba2
from stoker.layers.mla import MLA
from stoker.layers.mlp import MLP
from stoker.layers.moe import MoE
from stoker.layers.norm import Norm
from stoker.layers.rope import rope_table

# The block for each type of config.
MIXERS: dict[type, Any] = {AttentionConfig: Attention, MLAConfig: MLA}
STATE_BLOCKS: dict[type, Any] = {Mamba1Config: Mamba1, Mamba2Config: Mamba2, DeltaNetConfig: DeltaNet}
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
        mlp = config.mlp
        self.attention = _make_mixer(config, loader, name, hidden, tables)
        self.mlp = None if mlp is None else FEED_FORWARDS[type(mlp)](mlp, loader, f"{name}.mlp", hidden)
        self.residual_scale = config.residual_scale
        self.skip_scale = config.skip_scale
        self.has_mlp_norm = "mlp_norm" in self.norms(config)
        for norm in self.norms(config):
            setattr(self, norm, Norm(config.norm, loader, f"{name}.{norm}", hidden))

    attention: Any  # the block that mixes tokens: attention, a block with a state, or both
    mlp: Any
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


class Single(Layer):
    """norm → block → add, without an MLP (Mamba)."""

    @staticmethod
    def norms(config: LayerConfig) -> tuple[str, ...]:
        return ("attention_norm",)

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        if self.residual_scale == 1.0:
            return self.attention(x, batch, cache, self.attention_norm, x)
        return x + self.attention(x, batch, cache, self.attention_norm) * self.residual_scale


class AltUp(Sandwich):
    """A sandwich layer that computes one of several streams, beside a low-rank product and an input of its own (Gemma 3n)."""

    def __init__(self, config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> None:
        super().__init__(config, loader, name, hidden, tables)
        assert config.altup is not None
        self.altup = AltUpLayer(config.altup, config.norm, loader, name, hidden)

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        predicted, inputs = self.altup.predict_streams(x)
        active = predicted[:, self.altup.config.active].contiguous()
        normalized = self.attention_norm(active)
        attended = active + self.attention_post_norm(self.attention(normalized, batch, cache))
        y = (attended + self.altup.laurel(normalized)) * 0.5**0.5
        return self.altup.correct_streams(predicted, y + self.mlp_post_norm(self.mlp(y, self.mlp_norm)), inputs)


class AttentionAndState:
    """Attention and a block with a state, which have the same input and whose outputs are added (Falcon-H1)."""

    def __init__(self, attention: Any, state: Any, scales: BranchScales) -> None:
        self.attention, self.state, self.scales = attention, state, scales

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """attention(norm(x)) + state(norm(x)) + residual, [T, hidden], summed over ranks, with the multipliers of `scales`."""
        scales, normalized = self.scales, x if norm is None else norm(x)
        inner = normalized if scales.attention_in == 1.0 else normalized * scales.attention_in
        x = _add_scaled(self.attention, inner, batch, cache, residual, scales.attention_out)
        inner = normalized if scales.state_in == 1.0 else normalized * scales.state_in
        return _add_scaled(self.state, inner, batch, cache, x, scales.state_out)


def _add_scaled(block: Any, x: Tensor, batch: ForwardBatch, cache: KVCache, residual: Tensor | None, scale: float) -> Tensor:
    """scale × block(x) + residual, [T, hidden]."""
    if scale == 1.0:
        out: Tensor = block(x, batch, cache, None, residual)
        return out
    out = block(x, batch, cache)
    return out * scale if residual is None else residual.add(out, alpha=scale)


def _make_mixer(config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> Any:
    """The block of a layer that mixes tokens, with its weights loaded."""
    attention, state = config.attention, config.state
    blocks = []
    if attention is not None:
        blocks.append(MIXERS[type(attention)](attention, loader, f"{name}.attention", hidden, tables.get(attention.rope)))
    if state is not None:
        blocks.append(STATE_BLOCKS[type(state)](state, loader, f"{name}.state", hidden))
    return blocks[0] if len(blocks) == 1 else AttentionAndState(blocks[0], blocks[1], config.branch_scales)


def mixer_specs(config: LayerConfig, name: str, hidden: int) -> list[Spec]:
    """The specs of the blocks of a layer that mix tokens."""
    specs: list[Spec] = []
    if config.attention is not None:
        specs += MIXERS[type(config.attention)].all_specs(config.attention, f"{name}.attention", hidden).values()
    if config.state is not None:
        specs += STATE_BLOCKS[type(config.state)].specs(config.state, f"{name}.state", hidden).values()
    return specs


LAYOUTS: dict[str, type[Layer]] = {
    "pre": PreNorm,
    "sandwich": Sandwich,
    "post": PostNorm,
    "add_norm": AddNorm,
    "last": NormLast,
    "parallel": Parallel,
    "single": Single,
    "altup": AltUp,
}


def make_layer(config: LayerConfig, loader: Loader, name: str, hidden: int, tables: RopeTables) -> Layer:
    """The layer of the layout that `config` names, with its weights loaded. `name` is the prefix of weight names."""
    return LAYOUTS[config.layout](config, loader, name, hidden, tables)
