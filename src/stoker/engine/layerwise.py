"""Runs a model one layer at a time, so that a model of any size is evaluated with the weights of a single layer in memory.

Calibration records the inputs of a layer's linears, quantizes the layer, and continues with the quantized one. `stoker eval` and the
accuracy check of the build compute perplexity. Between layers, hidden states are in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import ModelConfig
from stoker.kernels.types import MEAN_TOKENS
from stoker.layers.decoder import Decoder, kv_shapes, load_cache_fields
from stoker.layers.layer import RopeTables, make_layer
from stoker.layers.loader import Loader
from stoker.layers.state_cache import StateCache


def split_windows(token_ids: list[int], length: int, count: int | None = None) -> list[Tensor]:
    """Cut a text into at most `count` int32 windows of `length` tokens without overlap.

    A last window with less than 2 tokens is dropped.
    """
    windows = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    return [torch.tensor(window, dtype=torch.int32) for window in windows if len(window) > 1][:count]


@dataclass(slots=True)
class Scores:
    """How well a model predicts the tokens of its windows. Each token is predicted from the tokens before it in its window."""

    nll: float = 0.0  # sum of negative log-likelihoods (natural logarithm)
    count: int = 0  # predicted tokens
    best: list[Tensor] = field(default_factory=list)  # per window, int32: the most likely next token at each position

    @property
    def perplexity(self) -> float:
        """The perplexity: exp of the mean negative log-likelihood per token."""
        return math.exp(min(self.nll / max(self.count, 1), 700.0))

    def agreement(self, other: Scores) -> float:
        """The fraction of positions at which both models have the same most likely token."""
        same = sum(int((a == b).sum()) for a, b in zip(self.best, other.best, strict=True))
        return same / max(sum(len(a) for a in self.best), 1)


class LayerwiseModel:
    """A forward pass over windows of tokens that is run layer by layer.

    `hidden` holds one tensor [tokens, stream_width] per window: the input of layer number `layer`, which is the next one to run.
    """

    def __init__(self, config: ModelConfig, tokens: list[Tensor]) -> None:
        if config.requires_whole_prompt:
            raise ConfigError(
                f"{config.architecture} is a prefix LM: its prompt tokens attend in both directions, so it has no perplexity.",
                cure="Skip the evaluation.",
            )
        longest = max((len(window) for window in tokens), default=0)
        if longest > config.max_positions:
            raise ConfigError(
                f"a window has {longest} tokens, and the model has {config.max_positions} positions.", cure="Use shorter windows."
            )
        self.config = config
        self.tokens = tokens
        self.hidden: list[Tensor] = []
        self.layer = 0
        self._without_layers = msgspec.structs.replace(config, layers=())
        self._rope_tables: RopeTables | None = None
        self._shared_layers = {config.kv_layer(i) for i in range(config.num_layers) if config.kv_layer(i) != i}
        self._shared_caches: dict[tuple[int, int], KVCache] = {}  # by layer and window: caches that later layers read

    @torch.inference_mode()
    def embed(self, loader: Loader) -> None:
        """Compute the input of the first layer for all windows."""
        decoder = Decoder(self._without_layers, loader, 1)
        self.hidden = [decoder.begin(_single_row_batch(window.to(loader.device))).cpu() for window in self.tokens]
        self.layer = 0

    @torch.inference_mode()
    def run_layer(self, loader: Loader, *, discard_output: bool = False) -> None:
        """Run the next layer with weights from `loader` on all windows, whose hidden states it replaces.

        With `discard_output`, hidden states and next layer stay as they are. This serves to record the inputs of the layer's linears.
        """
        config, index, tables = self.config.layers[self.layer], self.layer, self.rope_tables(loader.device)
        layer = make_layer(config, loader, f"layers.{index}", self.config.hidden_size, tables)
        cache_fields, shared = load_cache_fields(self.config, index, loader, tables), self.config.kv_layer(index)
        for i, window in enumerate(self.tokens):
            cache = self._make_cache(len(window), loader, cache_fields) if shared == index else self._shared_caches[shared, i]
            if index in self._shared_layers:
                self._shared_caches[index, i] = cache
            out = layer(self.hidden[i].to(loader.device), _single_row_batch(window.to(loader.device)), cache).cpu()
            if not discard_output:
                self.hidden[i] = out
        if not discard_output:
            self.layer += 1

    def rope_tables(self, device: torch.device) -> RopeTables:
        """Rotary tables for the positions of all windows, and for MEAN_TOKENS positions that share a key mean."""
        if self._rope_tables is None:
            self._rope_tables = RopeTables(max(MEAN_TOKENS, max(map(len, self.tokens), default=0)), device)
        return self._rope_tables

    @torch.inference_mode()
    def score(self, loader: Loader) -> Scores:
        """Predict the tokens of each window from the output of the last layer, with the head's weights from `loader`."""
        decoder, scores = Decoder(self._without_layers, loader, 1), Scores()
        for window, hidden in zip(self.tokens, self.hidden, strict=True):
            found = decoder.score(hidden[:-1].to(loader.device), window[1:].to(loader.device))
            scores.nll -= float(found.likelihoods.double().sum())
            scores.count += len(window) - 1
            scores.best.append(found.best.cpu())
        return scores

    def run(self, loader: Loader, progress: Callable[[int, int], None] | None = None) -> Scores:
        """Run all layers and score the result. `progress` receives (layers done, number of layers)."""
        self.embed(loader)
        for index in range(self.config.num_layers):
            self.run_layer(loader)
            if progress is not None:
                progress(index + 1, self.config.num_layers)
        return self.score(loader)

    def _make_cache(self, length: int, loader: Loader, cache_fields: dict[str, Tensor]) -> KVCache:
        """A KV cache of one block of `length` tokens for the next layer."""
        heads, key_size, value_size = kv_shapes(self.config, self.layer)
        kv_cache = loader.recipe.kv_cache
        dtype = getattr(torch, kv_cache) if kv_cache is not None else loader.dtype
        keys, values = (torch.zeros(1, heads, length, size, dtype=dtype, device=loader.device) for size in (key_size, value_size))
        cache = KVCache(keys, values if value_size else None)
        for name, tensor in cache_fields.items():
            setattr(cache, name, tensor)
        cache.state = StateCache(self.config, [self.layer], 1, 1, loader.dtype, loader.device).layers[0]
        return cache


def _single_row_batch(window: Tensor) -> ForwardBatch:
    """The batch for the prefill of one sequence, whose only KV cache block is as long as the window."""
    length, device = len(window), window.device

    def int32(*values: int) -> Tensor:
        """An int32 tensor of these values on the window's device."""
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(length, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=window,
        positions=positions,
        slots=positions,
        query_starts=int32(0, length),
        seq_lens=int32(length),
        block_tables=int32(0)[None],
        num_decodes=int(length == 1),
        max_query_len=length,
        max_seq_len=length,
        state_slots=int32(0),
    )
