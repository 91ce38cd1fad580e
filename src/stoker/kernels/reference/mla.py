"""Latent attention (arXiv 2405.04434, section 2.1) in plain torch: the paged cache keeps a latent and a rotated key part a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.kernels.reference.attention import attention
from stoker.kernels.reference.rope import rotate, store
from stoker.kernels.types import AttentionParams

if TYPE_CHECKING:
    from stoker.layers.batch import ForwardBatch, KVCache


def latent_store(
    q_rope: Tensor, latent: Tensor, k_rope: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, cache: KVCache, slots: Tensor
) -> Tensor:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    turned = rotate(k_rope.unsqueeze(1), cos, sin, interleaved)
    store(cache.keys, torch.cat((latent.unsqueeze(1), turned), dim=-1), slots, cache.key_scale)
    return rotate(q_rope, cos, sin, interleaved)


def latent_attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams, rank: int) -> Tensor:
    return attention(q, cache, batch, params).view(*q.shape)[..., :rank]
