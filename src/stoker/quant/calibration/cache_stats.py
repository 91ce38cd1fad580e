"""The scales of a quantized KV cache, measured by calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig, MLAConfig
from stoker.quant.key_spreading import KeyStats, has_mean

KV_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest value of each KV dtype


def cache_scale(largest: Tensor, kv_cache: str) -> Tensor:
    """The scales of heads whose largest magnitudes are `largest`, for a KV cache of dtype `kv_cache`.

    For e4m3 they are powers of two, because other scales would only move the rounding steps.
    """
    unit = (largest / KV_MAX[kv_cache]).clamp(min=1e-8)
    return unit if kv_cache == "int8" else unit.log2().ceil().exp2()


class CacheStats:
    """The tensors of a layer's quantized cache (`layers.decoder.kv_cache_specs`), measured on calibration tokens.

    `table`: the rotary table of the first MEAN_TOKENS positions, where the windows begin; None for models without rotary embedding.
    """

    def __init__(self, attention: AttentionConfig | MLAConfig, kv_cache: str, table: Tensor | None = None) -> None:
        self.kv_cache = kv_cache
        self.keys = KeyStats(attention, table, has_mean(attention, kv_cache)) if isinstance(attention, AttentionConfig) else None
        self.largest: dict[str, Tensor] = {}

    def add(self, queries: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Add one calibration window of T tokens: queries [T, heads, size], keys and values [1, kv_heads, T, size], not quantized."""
        if self.keys is None:
            self._add("key_scale", keys)
        else:
            self.keys.add(queries, keys[0].transpose(0, 1))
        if values is not None:
            self._add("value_scale", values)

    def _add(self, name: str, pages: Tensor) -> None:
        """Update the largest magnitude per head for the scale `name`."""
        largest = pages.float().abs().amax(dim=(0, 2, 3)).cpu()
        self.largest[name] = torch.maximum(self.largest[name], largest) if name in self.largest else largest

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name: key_scale and value_scale float32 [kv_heads].

        Caches of keys and values (not of latents) also have key_balance float32 [kv_heads, 2, head_size] and, if `key_spreading.has_mean`,
        key_mean float32 [kv_heads, head_size].
        """
        scales = {name: cache_scale(largest, self.kv_cache) for name, largest in self.largest.items()}
        if self.keys is None:
            return scales
        spread = {"key_scale": cache_scale(self.keys.largest(), self.kv_cache), "key_balance": self.keys.balance()}
        return scales | spread | ({"key_mean": self.keys.mean()} if self.keys.less_mean else {})
