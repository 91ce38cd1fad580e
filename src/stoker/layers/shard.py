"""Divides declared weights among the ranks of a stage. Pure arithmetic on specs.

All ranks have the same shapes. Where the rows or columns of a weight do not suffice for all ranks, shards are filled with zeros, which add
nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from stoker.core.specs import LinearSpec, TensorSpec


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is divided among `size` tensor-parallel ranks, or `replicas` data-parallel ones."""

    size: int = 1
    unit: int = 1  # shards have a multiple of this number of columns, and of rows of the vocabulary: `Recipe.shard_unit`
    by_expert: bool = False  # expert parallelism: each rank has whole experts instead of a shard of every expert
    replicas: int = 1  # data-parallel ranks: only experts are divided among them, everything else is complete on each

    @property
    def num_expert_ranks(self) -> int:
        """The number of ranks among which whole experts are divided."""
        return self.size * self.replicas


WHOLE = Sharding()


class AxisSlice(NamedTuple):
    """A range of `length` indices of an axis from `start` on. A start of -1 stands for zeros that fill the shard."""

    start: int
    length: int


def local_spec(spec: LinearSpec, sharding: Sharding) -> LinearSpec:
    """The spec of one rank's shard of `spec`."""
    if spec.num_experts and sharding.by_expert:
        return msgspec.structs.replace(spec, num_experts=-(-spec.num_experts // sharding.num_expert_ranks))
    if sharding.size == 1 or spec.split == "none":
        return spec
    if spec.split in ("row", "row_heads"):
        return msgspec.structs.replace(spec, in_features=_total(column_slices(spec, sharding, 0)))
    return msgspec.structs.replace(spec, parts=tuple(_total(part) for part in _part_slices(spec, sharding, 0)))


def local_shape(spec: TensorSpec, sharding: Sharding) -> tuple[int, ...]:
    """The shape of one rank's shard of a tensor that is not a linear's weight."""
    return (_total(tensor_slices(spec, sharding, 0)), *spec.shape[1:])


def has_bias(spec: LinearSpec, sharding: Sharding, rank: int) -> bool:
    """Whether a rank adds the bias of the linear. Where the results of all ranks are summed, only rank 0 does."""
    summed = sharding.size > 1 and spec.split in ("row", "row_heads") and not (spec.num_experts and sharding.by_expert)
    return spec.bias and (rank == 0 or not summed)


def expert_slices(spec: LinearSpec, sharding: Sharding, rank: int) -> list[AxisSlice]:
    """The slices of the expert axis that a rank holds."""
    return _even_slices(spec.num_experts, sharding.num_expert_ranks, rank, 1) if sharding.by_expert else [AxisSlice(0, spec.num_experts)]


def row_slices(spec: LinearSpec, sharding: Sharding, rank: int) -> list[AxisSlice]:
    """The slices of the weight's output rows that a rank holds, in the order in which its shard stores them."""
    if sharding.size == 1 or spec.split in ("none", "row", "row_heads") or (spec.num_experts and sharding.by_expert):
        return [AxisSlice(0, spec.out_features)]
    return _offset_parts(spec.parts, _part_slices(spec, sharding, rank))


def column_slices(spec: LinearSpec, sharding: Sharding, rank: int) -> list[AxisSlice]:
    """The slices of the weight's input features that a rank holds, in the order in which its shard stores them."""
    if spec.split == "row_heads" and sharding.size > 1:
        num_heads = spec.in_features // spec.head_size
        return _head_slices(query_heads(num_heads, spec.num_kv_heads or num_heads, sharding.size, rank), spec.head_size)
    if spec.split == "row" and not (spec.num_experts and sharding.by_expert):
        return _even_slices(spec.in_features, sharding.size, rank, sharding.unit)
    return [AxisSlice(0, spec.in_features)]


def tensor_slices(spec: TensorSpec, sharding: Sharding, rank: int) -> list[AxisSlice]:
    """The slices of the first axis that a rank holds, of a tensor that is not a linear's weight."""
    size, unit = sharding.size, spec.head_size
    if size == 1 or spec.split == "none":
        return [AxisSlice(0, spec.shape[0])]
    if spec.parts:
        return _offset_parts(spec.parts, _independent_parts(spec.parts, spec.part_heads, size, rank))
    heads = spec.shape[0] // unit
    if spec.split == "kv_heads":
        return _head_slices(kv_heads(heads, size, rank), unit)
    return _head_slices(query_heads(heads, spec.num_kv_heads or heads, size, rank), unit)


def num_local_kv_heads(num_kv_heads: int, size: int) -> int:
    """The number of key-value heads of each rank, including heads of zeros."""
    return len(kv_heads(num_kv_heads, size, 0))


def kv_copies(num_kv_heads: int, size: int) -> int:
    """The number of ranks that hold each key-value head: more than 1 if there are more ranks than heads.

    Ranks with copies of the same head divide its query heads among themselves.
    """
    return max(size // num_kv_heads, 1)


def kv_heads(num_kv_heads: int, size: int, rank: int) -> list[int | None]:
    """The key-value heads of a rank. None stands for a head of zeros."""
    copies = kv_copies(num_kv_heads, size)
    return [None if slot is None else slot // copies for slot in _slots(num_kv_heads * copies, size, rank)]


def query_heads(num_heads: int, num_kv_heads: int, size: int, rank: int) -> list[int | None]:
    """The query heads of a rank, the same number for each of its key-value heads. None stands for a head of zeros."""
    copies, group = kv_copies(num_kv_heads, size), num_heads // num_kv_heads
    per_copy = -(-group // copies)
    heads: list[int | None] = []
    for slot in _slots(num_kv_heads * copies, size, rank):
        if slot is None:
            heads += [None] * per_copy
            continue
        kv, copy = divmod(slot, copies)
        heads += [kv * group + i if i < group else None for i in range(copy * per_copy, (copy + 1) * per_copy)]
    return heads


def _slots(count: int, size: int, rank: int) -> list[int | None]:
    """The indices of `count` items that belong to a rank, in order; None beyond the last item."""
    per_rank = -(-count // size)
    return [slot if slot < count else None for slot in range(rank * per_rank, (rank + 1) * per_rank)]


def _part_slices(spec: LinearSpec, sharding: Sharding, rank: int) -> list[list[AxisSlice]]:
    """For each part of a fused weight, the slices of its rows that a rank holds: whole heads for split "heads", otherwise equal numbers."""
    if spec.split != "heads":
        return [_even_slices(rows, sharding.size, rank, sharding.unit) for rows in spec.parts]
    if spec.part_heads:
        return _independent_parts(spec.parts, spec.part_heads, sharding.size, rank)
    heads = [rows // spec.head_size for rows in spec.parts]
    num_kv = spec.num_kv_heads or heads[-1]
    queries = query_heads(heads[0], num_kv, sharding.size, rank)
    keys = kv_heads(num_kv, sharding.size, rank)
    return [_head_slices(queries if i == 0 else keys, spec.head_size) for i in range(len(heads))]


def _independent_parts(parts: tuple[int, ...], part_heads: tuple[int, ...], size: int, rank: int) -> list[list[AxisSlice]]:
    """For each part, the slices of its rows that a rank holds, if each part is divided by its own number of heads."""
    return [_head_slices(kv_heads(heads, size, rank), rows // heads) for rows, heads in zip(parts, part_heads, strict=True)]


def _offset_parts(parts: tuple[int, ...], part_slices: list[list[AxisSlice]]) -> list[AxisSlice]:
    """The slices of all parts, as indices of the axis on which the parts follow each other."""
    slices, offset = [], 0
    for rows, part in zip(parts, part_slices, strict=True):
        slices += [AxisSlice(start + offset if start >= 0 else start, length) for start, length in part]
        offset += rows
    return slices


def _even_slices(count: int, size: int, rank: int, unit: int) -> list[AxisSlice]:
    """A rank's equal shard of `count` indices, in multiples of `unit`, filled with zeros where indices do not suffice."""
    if size == 1:
        return [AxisSlice(0, count)]
    per_rank = -(-count // (size * unit)) * unit
    start = rank * per_rank
    real = min(max(count - start, 0), per_rank)
    return [part for part in (AxisSlice(start, real), AxisSlice(-1, per_rank - real)) if part.length]


def _head_slices(heads: Iterable[int | None], unit: int) -> list[AxisSlice]:
    """The slices of heads with `unit` indices each. Slices of neighbouring heads are merged."""
    slices: list[AxisSlice] = []
    for head in heads:
        start = -1 if head is None else head * unit
        last = slices[-1] if slices else None
        if last is not None and (start == last.start == -1 or (last.start >= 0 and start == last.start + last.length)):
            slices[-1] = AxisSlice(last.start, last.length + unit)
        else:
            slices.append(AxisSlice(start, unit))
    return slices


def _total(slices: list[AxisSlice]) -> int:
    """The number of indices in all slices."""
    return sum(part.length for part in slices)
