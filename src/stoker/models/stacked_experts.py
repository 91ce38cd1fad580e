"""Linears of single experts in the stacked tensors of a checkpoint.

transformers 5 stores the experts of a layer in two tensors without the suffix `.weight`. Rows are contiguous, so that each linear is a
range of the elements:

    experts.gate_up_proj [E, 2 × I, H]     experts.{e}.gate_proj.weight [I, H], experts.{e}.up_proj.weight [I, H]
    experts.down_proj [E, H, I]            experts.{e}.down_proj.weight [H, I]
"""

from __future__ import annotations

import re
from typing import NamedTuple

_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


class ExpertPart(NamedTuple):
    """A linear of one expert."""

    name: str
    first: int  # of its elements in the stacked tensor
    shape: tuple[int, int]


def expert_parts(name: str, shape: tuple[int, ...]) -> list[ExpertPart]:
    """The linears in a tensor, in their order. Empty if it has no stacked experts."""
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return []
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    count, rows, columns = shape[0], shape[1] // len(kinds), shape[2]
    if rows * len(kinds) != shape[1]:
        return []
    names = [f"{match[1]}.{expert}.{kind}_proj.weight" for expert in range(count) for kind in kinds]
    return [ExpertPart(part, i * rows * columns, (rows, columns)) for i, part in enumerate(names)]
