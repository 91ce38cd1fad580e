"""The decoder, composed from a ModelConfig. One class serves all architectures, which differ in data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.distributed.pipeline import ALONE, Stage
from stoker.distributed.token_dispatch import gather_ragged
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion, TokenScores
from stoker.layers.altup import StreamExpansion, StreamMerge, altup_layer_specs
from stoker.layers.forwarded_states import ForwardedStates
from stoker.layers.fused_layer import FusedLayers
from stoker.layers.layer import FEED_FORWARDS, LAYOUTS, RopeTables, make_layer, mixer_specs
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm
from stoker.layers.overlapped_layers import OverlappedLayers
from stoker.layers.shard import num_local_kv_heads
from stoker.layers.vocabulary import Embedding, Head
from stoker.quant.key_spreading import has_mean, stored_means


def declare(config: ModelConfig, kv_cache: str | None = None, stage: Stage = ALONE) -> dict[str, Spec]:
    """The specs of all weights of a pipeline stage in file order. Keys are the names in the engine.

    With a quantized `kv_cache`, they include the tensors of the caches, which no checkpoint contains.
    """
    specs: list[Spec] = [*outer_specs(config, stage).values()]
    for i in stage.layers(config.num_layers):
        specs += layer_specs(config, i).values()
        if kv_cache is not None:
            specs += kv_cache_specs(config, i, kv_cache).values()
    if config.norm is not None and stage.is_last:
        specs += Norm.specs(config.norm, "norm", config.hidden_size).values()
    return {spec.name: spec for spec in specs}


def kv_shapes(config: ModelConfig, layer: int) -> tuple[int, int, int]:
    """(kv_heads, key size, value size) of a layer's cache over all ranks.

    With MLA the value size is 0, since keys contain the values. All are 0 for a layer without attention, and for one that reads the
    cache of another layer.
    """
    attention = config.layers[layer].attention
    if attention is None or config.kv_layer(layer) != layer:
        return 0, 0, 0
    if isinstance(attention, AttentionConfig):
        return attention.num_kv_heads, attention.head_size, attention.head_size
    return 1, attention.kv_rank + attention.rope_size, 0


def kv_width(config: ModelConfig, layer: int, tensor_parallel: int) -> int:
    """The number of values that the cache of one rank stores for one token of a layer, keys and values together."""
    heads, key, value = local_kv_shapes(config, layer, tensor_parallel)
    return heads * (key + value)


def local_kv_shapes(config: ModelConfig, layer: int, tensor_parallel: int) -> tuple[int, int, int]:
    """(kv_heads, key size, value size) of a layer's cache on one rank."""
    heads, key, value = kv_shapes(config, layer)
    return num_local_kv_heads(heads, tensor_parallel) if value else heads, key, value


def kv_cache_specs(config: ModelConfig, layer: int, kv_cache: str) -> dict[str, Spec]:
    """The specs of a layer's tensors for a quantized cache, per head: scales, the balance of keys, and their mean before rotation."""
    heads, key_size, value_size = kv_shapes(config, layer)
    if not heads:
        return {}
    name = f"layers.{layer}.attention"
    if not value_size:  # one latent head, which every rank holds
        return {"key_scale": TensorSpec(name=f"{name}.key_scale", shape=(heads,), dtype="float32")}
    shapes: dict[str, tuple[int, ...]] = {"key_scale": (heads,), "value_scale": (heads,), "key_balance": (heads, 2, key_size)}
    attention = config.layers[layer].attention
    if isinstance(attention, AttentionConfig) and has_mean(attention, kv_cache):
        shapes["key_mean"] = (heads, key_size)
    return {key: TensorSpec(name=f"{name}.{key}", shape=shape, split="kv_heads", dtype="float32") for key, shape in shapes.items()}


def load_cache_fields(config: ModelConfig, layer: int, loader: Loader, tables: RopeTables) -> dict[str, Tensor]:
    """The fields of a layer's `KVCache` other than its pages, by field name. Empty for a cache that is not quantized."""
    if loader.recipe.kv_cache is None:
        return {}
    fields, attention = loader.load(kv_cache_specs(config, layer, loader.recipe.kv_cache)), config.layers[layer].attention
    if isinstance(attention, AttentionConfig) and "key_mean" in fields:
        fields["key_mean"] = stored_means(fields, attention, tables.get(attention.cached_rope), tables.num_positions)
    return fields


def outer_specs(config: ModelConfig, stage: Stage = ALONE) -> dict[str, Spec]:
    """The specs of a stage's weights outside the layers: embeddings, final norm and head."""
    return (_first_specs(config) if stage.is_first else {}) | (_last_specs(config) if stage.is_last else {})


def embed_spec(config: ModelConfig) -> LinearSpec:
    """The spec of the token embedding. It is sharded only if it is also the head, because each step then reads every row."""
    width = config.embed_size or config.hidden_size
    return LinearSpec(
        name="embed", in_features=width, parts=(config.vocab_size,), split="vocab" if config.tie_head else "none", quantize=False
    )


def _first_specs(config: ModelConfig) -> dict[str, Spec]:
    """The specs of the weights that the first stage holds outside the layers."""
    hidden = config.hidden_size
    width = config.embed_size or hidden
    specs: dict[str, Spec] = {"embed": embed_spec(config)}
    if config.learned_positions:
        specs["positions"] = TensorSpec(name="positions.weight", shape=(config.learned_positions, hidden))
    if config.block_positions:
        specs["block_positions"] = TensorSpec(name="block_positions.weight", shape=(config.block_positions, hidden))
    if config.embed_norm is not None:
        specs |= {f"embed_norm.{k}": s for k, s in Norm.specs(config.embed_norm, "embed_norm", width).items()}
    if config.embed_size is not None:
        specs["project_in"] = LinearSpec(name="project_in", in_features=width, parts=(hidden,), quantize=False)
    if config.altup is not None:
        specs |= StreamExpansion.specs(config, config.altup)
    return specs


def _last_specs(config: ModelConfig) -> dict[str, Spec]:
    """The specs of the weights that the last stage holds outside the layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    width = config.embed_size or hidden
    specs: dict[str, Spec] = {}
    if config.altup is not None:
        specs |= StreamMerge.specs(config, config.altup)
    if config.embed_size is not None:
        specs["project_out"] = LinearSpec(name="project_out", in_features=hidden, parts=(width,), quantize=False)
    if config.tie_head:
        specs["embed"] = embed_spec(config)
        if config.head_bias:
            specs["head_bias"] = TensorSpec(name="head.bias", shape=(vocab,), split="vocab")
    else:
        specs["head"] = LinearSpec(name="head", in_features=width, parts=(vocab,), bias=config.head_bias, split="vocab", quantize=False)
    return specs


def layer_specs(config: ModelConfig, index: int) -> dict[str, Spec]:
    """The specs of all weights of layer number `index`. Keys are the names in the engine."""
    layer, name, hidden = config.layers[index], f"layers.{index}", config.hidden_size
    specs: list[Spec] = []
    for norm in LAYOUTS[layer.layout].norms(layer):
        specs += Norm.specs(layer.norm, f"{name}.{norm}", hidden).values()
    specs += mixer_specs(layer, name, hidden)
    specs += altup_layer_specs(layer, name, hidden)
    if layer.mlp is not None:
        specs += FEED_FORWARDS[type(layer.mlp)].all_specs(layer.mlp, f"{name}.mlp", hidden).values()
    return {spec.name: spec for spec in specs}


# Prefixes of the weights outside the layers that a block of the decoder loads.
_LOADED_BY_BLOCKS = ("embed_norm", "altup.", "layer_inputs.")


class Decoder:
    """A model, or one pipeline stage of it, on one rank: token ids and a paged KV cache in, logits out."""

    def __init__(self, config: ModelConfig, loader: Loader, num_positions: int, stage: Stage = ALONE) -> None:
        self.config, self.stage = config, stage
        self.dtype, self.device = loader.dtype, loader.device
        weights = loader.load({k: s for k, s in outer_specs(config, stage).items() if not k.startswith(_LOADED_BY_BLOCKS)})
        if stage.is_first:
            self.embed = Embedding(weights["embed"], embed_spec(config), loader)
        if stage.is_last:
            self.head = Head(weights.get("head") or weights["embed"], config.vocab_size, loader.group, weights.get("head_bias"))
        self.positions: Tensor | None = weights.get("positions")
        self.block_positions: Tensor | None = weights.get("block_positions")
        self.project_in, self.project_out = weights.get("project_in"), weights.get("project_out")
        hidden = config.hidden_size
        embed_norm = config.embed_norm if stage.is_first else None
        self.embed_norm = Norm(embed_norm, loader, "embed_norm", config.embed_size or hidden) if embed_norm else None
        altup = config.altup
        self.expansion = StreamExpansion(config, altup, loader) if altup is not None and stage.is_first else None
        self.merge = StreamMerge(config, altup, loader) if altup is not None and stage.is_last else None
        tables, indices = RopeTables(num_positions, loader.device), stage.layers(config.num_layers)
        self.layers = [make_layer(config.layers[i], loader, f"layers.{i}", hidden, tables) for i in indices]
        self.fused_layers = FusedLayers.for_layers(self.layers)
        self.after_layer: Callable[[], None] | None = None  # called after each layer of a step without fused layers
        self.adapters, self.dispatch = loader.adapters, loader.dispatch
        self.overlapped_layers = OverlappedLayers.for_layers(self.layers, self.adapters, config.stream_width, self.device)
        self.norm = Norm(config.norm, loader, "norm", hidden) if config.norm is not None and stage.is_last else None
        self._cache_fields = [load_cache_fields(config, i, loader, tables) for i in indices]
        # Called with the number of layers of this stage that are computed, from 0 on, and the hidden states [T, stream_width] after them.
        # Of states that earlier stages forward, the numbers are negative.
        self.observe_layers: Callable[[int, Tensor], None] | None = None
        self._forwarded = ForwardedStates(stage, config.num_layers)

    @property
    def lookup_bytes(self) -> int:
        """The size of an embedding that is no output head. A step reads only the rows of its tokens."""
        return self.embed.num_bytes if self.stage.is_first and not self.config.tie_head else 0

    def forward_states(self, layers: Sequence[int]) -> None:
        """Make the stages send the hidden states before `layers` (ascending) to the last stage. All stages need the same layers."""
        self._forwarded = ForwardedStates(self.stage, self.config.num_layers, layers)
        if not self.stage.is_last:
            self.observe_layers = self._forwarded.observe

    @property
    def _row_bytes(self) -> int:
        """The size of a token of the residual stream."""
        return self.config.stream_width * self.dtype.itemsize

    def reserve_sums(self, max_tokens: int) -> None:
        """Allocate memory for sums over ranks that overlap with products, in steps of up to `max_tokens` tokens. Every rank calls it."""
        if self.overlapped_layers is not None:
            self.overlapped_layers.reserve(max_tokens, self._row_bytes)

    def keep_layers(self, indices: Sequence[int]) -> None:
        """Drop all layers of this stage except those at `indices`, for an ahead-of-time trace, which needs one layer of each kind."""
        self.layers = [self.layers[i] for i in indices]
        if self.fused_layers is not None:
            self.fused_layers = self.fused_layers.subset(indices)
        self.overlapped_layers = OverlappedLayers.for_layers(self.layers, self.adapters, self.config.stream_width, self.device)

    @contextmanager
    def only_layers(self, indices: Sequence[int]) -> Iterator[None]:
        """Within the block, steps run only the layers at `indices`, and have the caches of these. All ranks need the same indices."""
        every = self.layers, self.fused_layers, self.overlapped_layers
        self.keep_layers(indices)
        try:
            yield
        finally:
            self.layers, self.fused_layers, self.overlapped_layers = every

    def complete_caches(self, caches: list[KVCache]) -> None:
        """Set the fields of quantized caches (scales, balance, mean) on the `KVCache` of each layer."""
        for cache, fields in zip(caches, self._cache_fields, strict=True):
            for field, tensor in fields.items():
                setattr(cache, field, tensor)

    def __call__(self, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        """Logits [L, vocab] of the tokens `batch.logits_idx` (None: the last token of each row), in the model's dtype.

        Ranks that compute none (see `hidden_states`) return [0, vocab].
        """
        x = self.hidden_states(batch, caches)
        return torch.empty(0, self.config.vocab_size, dtype=self.dtype, device=self.device) if x is None else self.logits(x)

    def hidden_states(self, batch: ForwardBatch, caches: list[KVCache]) -> Tensor | None:
        """The states [L, stream_width] after the last layer of the tokens of which the caller computes logits.

        Stages before the last send the residual stream and the states of `forward_states` to the next stage, and return None. Of several
        data-parallel ranks, the first one returns the states of all, rank after rank, and the others return None.
        """
        stage = self.stage
        shape = (batch.num_tokens, self.config.stream_width)
        x = self.begin(batch) if stage.is_first else self._forwarded.receive(shape, self.dtype, self.device)
        for number, state in self._forwarded.pop_earlier() if stage.is_last else ():
            if self.observe_layers is not None:
                self.observe_layers(number, state)
        adapter_ids = batch.adapter_ids
        if self.dispatch is not None:
            assert batch.ranks is not None
            self.dispatch.counts = batch.ranks.tokens
        if self.adapters is not None:
            self.adapters.ids = adapter_ids
        elif adapter_ids is not None:
            raise ValueError("adapter_ids: the model was loaded without adapters")
        if self.fused_layers is not None and adapter_ids is None and self.fused_layers.supports(batch.num_tokens):
            x = self.fused_layers(x, batch, caches, self.observe_layers)
        elif self.overlapped_layers is not None and self.overlapped_layers.supports(batch, self._row_bytes):
            x = self.overlapped_layers(x, batch, caches, self.observe_layers, self.after_layer)
        else:
            for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
                if self.observe_layers is not None:
                    self.observe_layers(i, x)
                x = layer(x, batch, cache)
                if self.after_layer is not None:
                    self.after_layer()
            if self.observe_layers is not None:
                self.observe_layers(len(self.layers), x)
        if not stage.is_last:
            self._forwarded.send(x)
            return None
        logits_idx = batch.logits_idx if batch.logits_idx is not None else batch.query_starts[1:] - 1
        if not batch.is_decode:  # in a decode step every token is the last of its row
            x = x.index_select(0, logits_idx)
        if self.dispatch is not None:
            assert batch.ranks is not None
            x = gather_ragged(self.dispatch.group, x, batch.ranks.logits)
            if self.dispatch.group.rank:
                return None
        return x

    def begin(self, batch: ForwardBatch) -> Tensor:
        """The hidden states [T, stream_width] before the first layer: embeddings of tokens and positions."""
        config = self.config
        x = self.embed(batch.token_ids, self.dtype)
        if config.embed_scale != 1.0:
            # The scale is rounded to the model's dtype first, as the reference implementations do.
            x = x * torch.tensor(config.embed_scale, dtype=x.dtype).item()
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + ops.embedding(batch.positions + config.position_offset, self.positions)
        if self.block_positions is not None:
            assert batch.block_positions is not None, "models with learned block positions need those of the step"
            x = x + ops.embedding(batch.block_positions, self.block_positions)
        x = self.embed_norm(x) if self.embed_norm is not None else x
        return x if self.expansion is None else self.expansion(x, batch.token_ids)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, vocab] from the hidden states [T, stream_width] after the last layer."""
        return self.head.gather(self._local_logits(x))

    def greedy(self, x: Tensor) -> Tensor:
        """The token ids int32 [T] of the largest `logits(x)`, on all tensor-parallel ranks, which do not exchange their logits."""
        return self.head.greedy(self._local_logits(x))

    def _local_logits(self, x: Tensor) -> Tensor:
        """The logits [T, local rows] of this rank's rows of the vocabulary."""
        config = self.config
        logits = self.head(*self._head_input(x))
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def score(self, x: Tensor, targets: Tensor) -> TokenScores:
        """How well `logits(x)` predict the tokens `targets` int32 [T], on one rank."""
        inner, fusion = self._head_input(x)
        return self.head.score(inner, targets, fusion, self.config.logit_scale, self.config.logit_softcap)

    def _head_input(self, x: Tensor) -> tuple[Tensor, Fusion]:
        """(input of the head, fusion with which the head must be called)."""
        x = x if self.merge is None else self.merge(x)
        fusion = PLAIN if self.norm is None else self.norm.fusion
        return (x, fusion) if self.project_out is None else (self.project_out(x, fusion), PLAIN)
