"""Scales of an FP8 KV cache that a checkpoint stores: `k_scale` and `v_scale` of each layer. They multiply stored keys and values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.checks import FLOATS, dtype_name
from stoker.core.model_config import AttentionConfig

KV_CACHE = "float8_e4m3fn"
_NAME = re.compile(r"\.(\d{1,6})\.(?:\w+\.)*(?:k_proj\.|v_proj\.|attn\.)?(k|v)_scale$")


class CacheScales:
    """The scales of the KV cache in a checkpoint. `sources` are the names of the tensors, by layer and k or v."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.sources: dict[tuple[int, str], str] = {}
        for name in tensors:
            if (match := _NAME.search(name)) is None:
                continue
            key, info = (int(match[1]), match[2]), tensors[name]
            if math.prod(info.shape) != 1 or info.dtype not in FLOATS:
                raise CheckpointError(
                    f"{name} {list(info.shape)} {dtype_name(info.dtype)} is not one scale of the KV cache.", cure=DOWNLOAD_AGAIN
                )
            if key in self.sources:
                raise CheckpointError(f"{name} and {self.sources[key]} are scales of the same layer.", cure=DOWNLOAD_AGAIN)
            self.sources[key] = name

    def covers(self, num_layers: int) -> bool:
        """Whether each of the layers has a scale of keys and one of values."""
        return all((layer, kind) in self.sources for layer in range(num_layers) for kind in "kv")

    def tensors(self, layer: int, attention: AttentionConfig, weights: CheckpointWeights) -> dict[str, Tensor]:
        """The tensors of a layer's cache, named as `CacheStats.tensors` does: without a balance and a mean of keys.

        Keys are stored multiplied by an orthonormal matrix, which makes them larger by at most the square root of their size. The scale of
        keys grows by this factor; e4m3 loses no precision by it. Raises CheckpointError for a scale that is not a positive number.
        """
        heads, size = attention.num_kv_heads, attention.head_size
        key, value = (self._read(layer, kind, weights) for kind in "kv")
        scales = torch.tensor([key * math.sqrt(size), value]).log2().ceil().exp2()
        return {
            "key_scale": scales[:1].expand(heads).contiguous(),
            "value_scale": scales[1:].expand(heads).contiguous(),
            "key_balance": torch.ones(heads, 2, size),
            "key_mean": torch.zeros(heads, size),
        }

    def _read(self, layer: int, kind: str, weights: CheckpointWeights) -> float:
        """One scale. Raises CheckpointError unless it is a positive number."""
        name = self.sources[layer, kind]
        value = float(weights.read(name).float().reshape(-1)[0])
        if not 0 < value < 1e4:
            raise CheckpointError(f"{weights.location(name)}={value} is not a scale from 0 to 10,000.", cure=DOWNLOAD_AGAIN)
        return value
