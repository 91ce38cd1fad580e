"""Windows of tokens that pass a model one layer at a time: any model is measured with one layer's weights in memory.

Hidden states wait in host memory between layers.
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

HEAD_ROWS = 128  # whose logits are in memory at once


def windows(token_ids: list[int], length: int, count: int | None = None) -> list[Tensor]:
    """int32 pieces of `length` tokens without overlap, `count` at most; the last one may be shorter, but has two tokens."""
    pieces = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    return [torch.tensor(piece, dtype=torch.int32) for piece in pieces if len(piece) > 1][:count]


@dataclass(slots=True)
class Scores:
    """How well a model foretells the tokens of its windows, each from those before it in the window."""

    nll: float = 0.0  # the sum of negative log-likelihoods, natural
    count: int = 0
    best: list[Tensor] = field(default_factory=list)  # the likeliest next token at each place, int32, a tensor a window

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll / max(self.count, 1), 700.0))

    def agreement(self, other: Scores) -> float:
        """The share of places with the same likeliest token."""
        same = sum(int((a == b).sum()) for a, b in zip(self.best, other.best, strict=True))
        return same / max(sum(len(a) for a in self.best), 1)


class LayerStream:
    """`hidden` [T, hidden_size] of each window, before layer `layer`."""

    def __init__(self, config: ModelConfig, tokens: list[Tensor]) -> None:
        if config.requires_whole_prompt:
            raise ConfigError(f"{config.architecture} reads prompts in both directions: it has no perplexity.", cure="Skip it.")
        longest = max((len(window) for window in tokens), default=0)
        if longest > config.max_positions:
            raise ConfigError(f"windows of {longest} tokens, and the model has {config.max_positions} positions.", cure="Use shorter ones.")
        self.config = config
        self.tokens = tokens
        self.hidden: list[Tensor] = []
        self.layer = 0
        self._outer = msgspec.structs.replace(config, layers=())
        self._tables: RopeTables | None = None

    @torch.inference_mode()
    def begin(self, loader: Loader) -> None:
        """Look the tokens up."""
        outer = Decoder(self._outer, loader, 1)
        self.hidden = [outer.begin(_batch(window.to(loader.device))).cpu() for window in self.tokens]
        self.layer = 0

    @torch.inference_mode()
    def advance(self, loader: Loader, *, keep: bool = False) -> None:
        """Pass the next layer. `keep`: only run it."""
        config, index, tables = self.config.layers[self.layer], self.layer, self.tables(loader.device)
        layer = make_layer(config, loader, f"layers.{index}", self.config.hidden_size, tables)
        of_cache = load_cache_fields(self.config, index, loader, tables)
        for i, window in enumerate(self.tokens):
            cache = self._cache(len(window), loader, of_cache)
            out = layer(self.hidden[i].to(loader.device), _batch(window.to(loader.device)), cache).cpu()
            if not keep:
                self.hidden[i] = out
        if not keep:
            self.layer += 1

    def tables(self, device: torch.device) -> RopeTables:
        """The rotary rows of all windows' positions, and of as many as share a mean of keys."""
        if self._tables is None:
            self._tables = RopeTables(max(MEAN_TOKENS, max(map(len, self.tokens), default=0)), device)
        return self._tables

    @torch.inference_mode()
    def score(self, loader: Loader) -> Scores:
        """Foretell each window's tokens from the stream after the last layer."""
        outer, scores = Decoder(self._outer, loader, 1), Scores()
        for window, hidden in zip(self.tokens, self.hidden, strict=True):
            best = []
            for start in range(0, len(window) - 1, HEAD_ROWS):
                rows = slice(start, min(start + HEAD_ROWS, len(window) - 1))
                logits = outer.logits(hidden[rows].to(loader.device)).float()
                wanted = window[rows.start + 1 : rows.stop + 1].long().to(loader.device)
                scores.nll += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").double())
                best.append(logits.argmax(dim=-1).int().cpu())
            scores.count += len(window) - 1
            scores.best.append(torch.cat(best))
        return scores

    def run(self, loader: Loader, progress: Callable[[int, int], None] | None = None) -> Scores:
        """All layers, and the scores."""
        self.begin(loader)
        for index in range(self.config.num_layers):
            self.advance(loader)
            if progress is not None:
                progress(index + 1, self.config.num_layers)
        return self.score(loader)

    def _cache(self, length: int, loader: Loader, of_cache: dict[str, Tensor]) -> KVCache:
        heads, key_size, value_size = kv_shapes(self.config, self.layer)
        kv_cache = loader.recipe.kv_cache
        dtype = getattr(torch, kv_cache) if kv_cache is not None else loader.dtype
        keys, values = (torch.zeros(1, heads, length, size, dtype=dtype, device=loader.device) for size in (key_size, value_size))
        return KVCache(keys, values if value_size else None, **of_cache)


def _batch(window: Tensor) -> ForwardBatch:
    """One row in one block, as long as the window."""
    length, device = len(window), window.device

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    places = torch.arange(length, dtype=torch.int32, device=device)
    return ForwardBatch(window, places, places, ints(0, length), ints(length), ints(0)[None], int(length == 1), length, length)
