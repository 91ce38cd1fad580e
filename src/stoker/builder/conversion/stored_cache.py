"""The tensors of a quantized KV cache, made of the scales that the checkpoint stores."""

from __future__ import annotations

from torch import Tensor

from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.core.model_config import AttentionConfig
from stoker.engine.config import EngineConfig
from stoker.layers.decoder import kv_cache_specs


class StoredCacheTensors:
    """The tensors of `layers.decoder.kv_cache_specs` of all layers, by engine name."""

    def __init__(self, config: EngineConfig, weights: CanonicalWeights) -> None:
        self._tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(config.model.layers):
            assert isinstance(layer.attention, AttentionConfig) and config.recipe.kv_cache is not None
            found = weights.cache_scales.tensors(index, layer.attention, weights.inner)
            specs = kv_cache_specs(config.model, index, config.recipe.kv_cache)
            self._tensors |= {spec.name: found[key] for key, spec in specs.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]
