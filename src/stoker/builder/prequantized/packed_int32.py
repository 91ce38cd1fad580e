"""Small integers packed into int32 words, and the stored tensors of an int4 weight.

Shapes: `out` and `in` are the features of the linear; `groups` is the number of scale groups per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.quant import groups
from stoker.quant.formats.int4 import GROUP_SIZES

_FALLBACK_GROUP = 128


def unpack_int32(words: Tensor, bits: int = 4) -> Tensor:
    """uint8 [..., n × 32 / bits] from int32 words [..., n]: the lowest bits of a word come first. Values of 3 bits can span two words."""
    if bits == 3:
        return _unpack_three_bits(words)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(-2)


def _unpack_three_bits(words: Tensor) -> Tensor:
    """uint8 [..., n × 32 / 3] from int32 words [..., n], of which three hold 32 values."""
    runs = (words.to(torch.int64) & 0xFFFFFFFF).unflatten(-1, (-1, 3))
    stream = torch.cat((runs, torch.zeros_like(runs[..., :1])), dim=-1)  # a fourth word, so that each value has a next word
    first = torch.arange(0, 96, 3)
    pair = stream[..., first // 32] | (stream[..., first // 32 + 1] << 32)
    return ((pair >> (first % 32)) & 7).to(torch.uint8).flatten(-2)


def unpack_padded(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [..., count] from int32 words [..., n], each of which has 32 // bits values and no part of another: the lowest bits first."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    values: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(-2)[..., :count]


def int4_tensors(values: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> dict[str, Tensor]:
    """The stored tensors of an Int4 format from values [out, in] and scales and zero points [out, in / group]."""
    in_features = values.shape[1]
    stored = {"weight": groups.pack(values), "scale": split_groups(scale, group, in_features)}
    return stored if zero is None else stored | {"zero": split_groups(zero.to(torch.uint8), group, in_features)}


def split_groups(scale: Tensor, group: int, in_features: int) -> Tensor:
    """Scales [out, in / supported_group(group)] from `scale` [out, in / group]: the scale of a group that is too large is repeated."""
    supported = supported_group(group)
    return scale.repeat_interleave(-(-group // supported), 1)[:, : -(-in_features // supported)].contiguous()


def supported_group(group: int) -> int:
    """The group size in the engine: `group` if the format supports it, else a fraction of it. One group per row becomes several."""
    return group if group in GROUP_SIZES else _FALLBACK_GROUP


def feature_order(name: str, group_index: Tensor, group: int, reordered: bool = True) -> Tensor:
    """int64 [in]: the indices of the input features, sorted by their group; with `reordered` false as they are.

    `group_index` is the tensor `name`. Raises CheckpointError unless each group has `group` features.
    """
    order = group_index.argsort(stable=True) if reordered else torch.arange(len(group_index))
    if not torch.equal(group_index[order].long(), torch.arange(len(order)) // group):
        raise CheckpointError(
            f"{name} does not assign features to groups of {group}{'' if reordered else ' in order'}.",
            cure="Correct group_size and desc_act in config.json, or download the checkpoint again.",
        )
    return order
