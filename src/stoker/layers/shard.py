"""How declared weights are split over tensor-parallel ranks. Pure arithmetic on specs.

Every rank has the same shapes; what a rank has no real rows or columns for is filled with zeros, which add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from stoker.core.specs import LinearSpec, TensorSpec


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is spread over tensor-parallel ranks."""

    size: int = 1
    grain: int = 1  # columns, and the vocabulary's rows, are shared in whole multiples of this: the units of the weight formats
    by_expert: bool = False  # each rank has some experts whole, not a share of each


WHOLE = Sharding()


class Piece(NamedTuple):
    """`length` places of an axis from `start` on; from -1: as many zeros."""

    start: int
    length: int


def local_spec(spec: LinearSpec, sharding: Sharding) -> LinearSpec:
    """The spec of one rank's share of `spec`."""
    if sharding.size == 1 or spec.split == "none":
        return spec
    if spec.num_experts and sharding.by_expert:
        return msgspec.structs.replace(spec, num_experts=-(-spec.num_experts // sharding.size))
    if spec.split in ("row", "row_heads"):
        return msgspec.structs.replace(spec, in_features=_total(column_pieces(spec, sharding, 0)))
    return msgspec.structs.replace(spec, parts=tuple(_total(part) for part in _parts(spec, sharding, 0)))


def local_shape(spec: TensorSpec, sharding: Sharding) -> tuple[int, ...]:
    """The shape of one rank's share of a plain tensor."""
    return (_total(tensor_pieces(spec, sharding, 0)), *spec.shape[1:])


def has_bias(spec: LinearSpec, sharding: Sharding, rank: int) -> bool:
    """Whether a rank adds the linear's bias: where ranks' results are summed, one of them does."""
    summed = spec.split in ("row", "row_heads") and not (spec.num_experts and sharding.by_expert)
    return spec.bias and (rank == 0 or not summed)


def expert_pieces(spec: LinearSpec, sharding: Sharding, rank: int) -> list[Piece]:
    """The experts of a rank."""
    return _even(spec.num_experts, sharding.size, rank, 1) if sharding.by_expert else [Piece(0, spec.num_experts)]


def row_pieces(spec: LinearSpec, sharding: Sharding, rank: int) -> list[Piece]:
    """The output rows of a rank, in its order."""
    if sharding.size == 1 or spec.split in ("none", "row", "row_heads") or (spec.num_experts and sharding.by_expert):
        return [Piece(0, spec.out_features)]
    pieces, offset = [], 0
    for rows, part in zip(spec.parts, _parts(spec, sharding, rank), strict=True):
        pieces += [Piece(start + offset if start >= 0 else start, length) for start, length in part]
        offset += rows
    return pieces


def column_pieces(spec: LinearSpec, sharding: Sharding, rank: int) -> list[Piece]:
    """The input features of a rank, in its order."""
    if spec.split == "row_heads" and sharding.size > 1:
        num_heads = spec.in_features // spec.head_size
        return _runs(query_heads(num_heads, spec.num_kv_heads or num_heads, sharding.size, rank), spec.head_size)
    if spec.split == "row" and not (spec.num_experts and sharding.by_expert):
        return _even(spec.in_features, sharding.size, rank, sharding.grain)
    return [Piece(0, spec.in_features)]


def tensor_pieces(spec: TensorSpec, sharding: Sharding, rank: int) -> list[Piece]:
    """A rank's places along the first axis of a plain tensor."""
    size, unit = sharding.size, spec.head_size
    if size == 1 or spec.split == "none":
        return [Piece(0, spec.shape[0])]
    heads = spec.shape[0] // unit
    if spec.split == "kv_heads":
        return _runs(kv_heads(heads, size, rank), unit)
    return _runs(query_heads(heads, spec.num_kv_heads or heads, size, rank), unit)


def num_local_kv_heads(num_kv_heads: int, size: int) -> int:
    """kv heads of each rank, zeros included."""
    return len(kv_heads(num_kv_heads, size, 0))


def kv_copies(num_kv_heads: int, size: int) -> int:
    """On how many ranks each kv head is: ranks beyond the kv heads take copies, and split their query heads."""
    return max(size // num_kv_heads, 1)


def kv_heads(num_kv_heads: int, size: int, rank: int) -> list[int | None]:
    """The kv heads of a rank; None is a head of zeros."""
    copies = kv_copies(num_kv_heads, size)
    return [None if slot is None else slot // copies for slot in _slots(num_kv_heads * copies, size, rank)]


def query_heads(num_heads: int, num_kv_heads: int, size: int, rank: int) -> list[int | None]:
    """The query heads of a rank, as many for each of its kv heads; None is a head of zeros."""
    copies, group = kv_copies(num_kv_heads, size), num_heads // num_kv_heads
    share = -(-group // copies)
    heads: list[int | None] = []
    for slot in _slots(num_kv_heads * copies, size, rank):
        if slot is None:
            heads += [None] * share
            continue
        kv, part = divmod(slot, copies)
        heads += [kv * group + i if i < group else None for i in range(part * share, (part + 1) * share)]
    return heads


def _slots(count: int, size: int, rank: int) -> list[int | None]:
    share = -(-count // size)
    return [slot if slot < count else None for slot in range(rank * share, (rank + 1) * share)]


def _parts(spec: LinearSpec, sharding: Sharding, rank: int) -> list[list[Piece]]:
    """A rank's rows of each part: queries first, then keys and values; or even shares."""
    if spec.split != "heads":
        return [_even(rows, sharding.size, rank, sharding.grain) for rows in spec.parts]
    heads = [rows // spec.head_size for rows in spec.parts]
    num_kv = heads[-1]
    queries = query_heads(heads[0], num_kv, sharding.size, rank)
    keys = kv_heads(num_kv, sharding.size, rank)
    return [_runs(queries if i == 0 else keys, spec.head_size) for i in range(len(heads))]


def _even(count: int, size: int, rank: int, grain: int) -> list[Piece]:
    if size == 1:
        return [Piece(0, count)]
    share = -(-count // (size * grain)) * grain
    start = rank * share
    real = min(max(count - start, 0), share)
    return [piece for piece in (Piece(start, real), Piece(-1, share - real)) if piece.length]


def _runs(heads: Iterable[int | None], unit: int) -> list[Piece]:
    """Neighbouring heads joined."""
    pieces: list[Piece] = []
    for head in heads:
        start = -1 if head is None else head * unit
        last = pieces[-1] if pieces else None
        if last is not None and (start == last.start == -1 or (last.start >= 0 and start == last.start + last.length)):
            pieces[-1] = Piece(last.start, last.length + unit)
        else:
            pieces.append(Piece(start, unit))
    return pieces


def _total(pieces: list[Piece]) -> int:
    return sum(piece.length for piece in pieces)
