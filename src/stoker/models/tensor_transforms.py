"""Functions that reorder checkpoint tensors into the engine's layout, for use in `Transformed`.

Each takes the source tensors and the model config. Weights are [out, in] and biases [out] unless the function says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig, ModelConfig


def transpose_conv1d(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Weights [out, in] from [in, out] of GPT-2's Conv1D. Several weights or biases are concatenated along the rows."""
    return torch.cat([t.t() if t.dim() == 2 else t for t in tensors])


def add_one(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """1 + w in float32 from a norm weight w, because Gemma's norms multiply by 1 + w."""
    return tensors[0].float() + 1


def normalize_rows(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """A weight [rows, hidden] with each row scaled to length 1, as in the output head of Baichuan 2."""
    return torch.nn.functional.normalize(tensors[0].float(), dim=-1)


def flatten(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The first tensor with a single axis."""
    return tensors[0].flatten()


def unflatten_heads(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `flatten` for norms [heads, head_size] of single heads."""
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    return (tensors[0].unflatten(0, (-1, attention.head_size)),)


def unflatten_row(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `flatten` for a tensor [1, n]."""
    return (tensors[0][None],)


def unchanged(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The engine tensors, where the checkpoint may contain them as they are."""
    return tuple(tensors)


def in_features_last(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Expert weights [experts, out, in] from [experts, in, out]; biases [experts, out] unchanged."""
    return tensors[0].transpose(1, 2) if tensors[0].dim() == 3 else tensors[0]


def in_features_first(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `in_features_last`."""
    return (tensors[0].transpose(1, 2) if tensors[0].dim() == 3 else tensors[0],)


def squeeze_conv(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The weight [channels, kernel] of a depthwise convolution from [channels, 1, kernel]. A bias [channels] does not change."""
    return tensors[0].squeeze(1) if tensors[0].dim() == 3 else tensors[0]


def unsqueeze_conv(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `squeeze_conv`."""
    return (tensors[0].unsqueeze(1) if tensors[0].dim() == 2 else tensors[0],)


def ungroup_qkv(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """All q rows, then all k rows, then all v rows, from rows that are fused in groups.

    A group is the queries of a key-value head, its key and its value. With as many key-value heads as heads, the groups are (q, k, v) of
    each head. With one key-value head, the order does not change.
    """
    q, k, v = split_qkv_groups(tensors[0], config)
    return torch.cat((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)))


def split_qkv_groups(fused: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q [heads, head_size, …], k and v [kv_heads, head_size, …] from rows that are fused in groups (see `ungroup_qkv`)."""
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    group = attention.num_heads // attention.num_kv_heads
    rows = fused.unflatten(0, (attention.num_kv_heads, group + 2, attention.head_size))
    return rows[:, :group].flatten(0, 1), rows[:, group], rows[:, group + 1]


def subtract_one(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `add_one`."""
    return (tensors[0].float() - 1,)


def untranspose_conv1d(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `transpose_conv1d` of one weight or bias."""
    return (tensors[0].t() if tensors[0].dim() == 2 else tensors[0],)


def group_qkv(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """Rows that are fused in groups, from all q rows, then all k rows, then all v rows: the inverse of `ungroup_qkv`."""
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    kv_heads, size = attention.num_kv_heads, attention.head_size
    q, k, v = tensors[0].split((attention.num_heads * size, kv_heads * size, kv_heads * size))
    parts = (q.unflatten(0, (kv_heads, -1, size)), k.unflatten(0, (kv_heads, 1, size)), v.unflatten(0, (kv_heads, 1, size)))
    return (torch.cat(parts, dim=1).flatten(0, 2),)
