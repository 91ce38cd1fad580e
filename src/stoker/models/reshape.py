"""Checkpoint tensors into the engine's order: what `Custom` makings share. All work on weights [out, in] and biases [out]."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig, ModelConfig


def transposed(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """GPT-2's Conv1D: weight [in, out]. Several are joined along the rows."""
    return torch.cat([t.t() if t.dim() == 2 else t for t in tensors])


def one_plus(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Gemma's norms multiply by 1 + w."""
    return tensors[0].float() + 1


def unit_rows(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Baichuan 2's head: each row has length one."""
    return torch.nn.functional.normalize(tensors[0].float(), dim=-1)


def flat(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    return tensors[0].flatten()


def grouped_qkv(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Rows [kv_heads × (queries of the group, key, value) × head_size] → all q, all k, all v.

    With as many kv heads as heads that is (q, k, v) head by head; with one it is the order wanted already.
    """
    q, k, v = split_groups(tensors[0], config)
    return torch.cat((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)))


def split_groups(fused: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q [heads, head_size, …], k and v [kv_heads, head_size, …]."""
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    group = attention.num_heads // attention.num_kv_heads
    rows = fused.unflatten(0, (attention.num_kv_heads, group + 2, attention.head_size))
    return rows[:, :group].flatten(0, 1), rows[:, group], rows[:, group + 1]
