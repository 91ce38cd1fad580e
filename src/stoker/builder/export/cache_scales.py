"""Scales of an FP8 KV cache for other tools: one for the keys and one for the values of each layer, which multiply what is stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.quant.calibration.cache_stats import KV_MAX

KV_CACHE = "float8_e4m3fn"
# The settings of an FP8 cache in quantization_config of compressed-tensors.
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_BELOW = 1 - 1e-6  # keeps the product with the square root below the power of two that it came from


def plain_cache_scales(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """`k_scale` and `v_scale`, float32 [1], from the tensors of a layer's cache (`layers.decoder.kv_cache_specs`) by their last name.

    The engine stores keys minus their mean, multiplied by a balance and by an orthonormal matrix. A plain key is at most the square root of
    the head size times larger, divided by the balance, plus the rotated mean. The scale of keys is the largest that these allow. It can be
    larger than the range of keys requires, by which e4m3 loses no precision.
    """
    size = stored["key_balance"].shape[-1]
    per_head = stored["key_scale"] * math.sqrt(size) / stored["key_balance"][:, 0].amin(-1)
    if "key_mean" in stored:  # a rotation makes a feature at most √2 times larger than the larger one of its pair
        per_head = per_head + stored["key_mean"].abs().amax(-1) * math.sqrt(2) / KV_MAX[KV_CACHE]
    is_as_imported = bool((stored["key_balance"] == 1).all()) and not bool(stored.get("key_mean", torch.zeros(1)).any())
    if is_as_imported:  # from the scale of a checkpoint, which the build multiplied by the square root
        per_head = stored["key_scale"] / math.sqrt(size) * _BELOW
    return {"k_scale": per_head.amax().reshape(1), "v_scale": stored["value_scale"].amax().reshape(1)}
