"""The rows of fused modules: where a rank has those of each part, and in which order Hugging Face has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.builder.checkpoint.tensorrt_llm.tensors import Data, Module


class RowPart(NamedTuple):
    """The rows of one part in the tensor of a rank. If neighbouring ranks have copies of a part, every `step`-th rank is used."""

    start: int
    length: int
    step: int = 1


def row_parts(module: Module, rows: int, data: Data, num_ranks: int) -> list[RowPart]:
    """The parts of a rank's tensor of `rows` rows. `data`: that of config.json, `num_ranks`: those that divide the rows.

    Raises ValueError for a number of rows that config.json does not imply.
    """
    if module.sizes is not None:
        return _parts_of_sizes(module.sizes(data), rows, num_ranks)
    if module.layout == "halves" or len(module.parts) == 2:
        return [RowPart(0, rows // 2), RowPart(rows // 2, rows // 2)]
    heads = data["num_attention_heads"]
    kv_heads = data.get("num_key_value_heads") or heads
    copies = max(1, num_ranks // kv_heads)  # of a key-value head, if there are fewer than ranks
    local = heads // num_ranks, kv_heads * copies // num_ranks
    units = local[0] + 2 * local[1]
    if units < 3 or rows % units or heads % num_ranks or (kv_heads * copies) % num_ranks:
        raise ValueError(f"has {rows} rows, which are not {heads} heads")
    q, kv = (count * (rows // units) for count in local)
    return [RowPart(0, q), RowPart(q, kv, copies), RowPart(q + kv, kv, copies)]


def _parts_of_sizes(sizes: tuple[int, ...], rows: int, num_ranks: int) -> list[RowPart]:
    """The parts with these sizes, of which each rank has an equal share. Raises ValueError unless they are `rows` rows."""
    if any(type(size) is not int or size < 1 or size % num_ranks for size in sizes) or sum(sizes) != rows * num_ranks:
        raise ValueError(f"has {rows} rows, which are not a part of {' + '.join(map(str, sizes))[:60]}")
    lengths = [size // num_ranks for size in sizes]
    return [RowPart(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def row_order(module: Module, parts: list[RowPart], rows: int, data: Data, num_ranks: int) -> Tensor:
    """int64: the rows of the tensors of all ranks, one after the other, in the order of the fused module of Hugging Face."""
    numbers = [
        torch.cat([torch.arange(part.start, part.start + part.length) + rank * rows for rank in range(0, num_ranks, part.step)])
        for part in parts
    ]
    if module.layout == "halves":
        return torch.cat(numbers[::-1])
    if module.layout == "heads":
        return torch.cat(numbers)
    num_groups = data.get(module.groups_key) or data["num_attention_heads"]
    return torch.cat([part.view(num_groups, -1) for part in numbers], 1).flatten()
