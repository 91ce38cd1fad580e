"""What an architecture file declares: how its config.json reads, and which checkpoint tensors make each engine tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stoker.base.registry import Registry
from stoker.core.model_config import ModelConfig

# HF config.json data → ModelConfig.
ReadConfig = Callable[[dict[str, Any]], ModelConfig]


@dataclass(frozen=True, slots=True)
class Custom:
    """An engine tensor made by a function. `combine` gets the sources' tensors in order; their names may hold {i} and {e}.

    It is applied to weights and biases alike, and to tensors on the meta device when shapes are checked.
    """

    sources: tuple[str, ...]
    combine: Callable[[list[Tensor], ModelConfig], Tensor]


# Engine name → checkpoint name(s). Names are of modules: ".weight" and ".bias" follow on both sides.
# "{i}" is the layer, "{e}" the expert (stacked along a new first axis). A tuple is concatenated along rows.
# A name that ends in a tensor suffix itself (".weight", ".bias", or listed in full) is taken as it stands.
Names = dict[str, str | tuple[str, ...] | Custom]


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """One kind of model: a row of ARCHITECTURES under the name that config.json's `architectures` gives."""

    name: str
    config: ReadConfig
    names: Callable[[ModelConfig], Names]
    family: str  # for people: "Llama 1, 2, 3"
    oracle: str  # what its parity test compares with
    model_types: tuple[str, ...] = ()  # config.json's `model_type`, for when `architectures` is absent
    aliases: tuple[str, ...] = ()  # other names in `architectures`
    variant: Callable[[dict[str, Any]], str | None] | None = None  # the row that a config.json of this name really is
    ignored: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that carry no weights (rotary tables, masks)
    optional: tuple[str, ...] = ()  # checkpoint tensors that may be absent or present (a tied head)
    renames: tuple[tuple[str, str], ...] = ()  # (regular expression, replacement): older spellings of checkpoint tensors
    versions: Mapping[str, Callable[[dict[str, Any]], tuple[str, ...]]] = field(default_factory=dict)  # option → what config.json is
    tensor_parallel: str = "any"  # what limits or costs the number of ranks

    def canonical(self, tensor: str) -> str:
        """A checkpoint tensor's name as `names` spells it."""
        for pattern, replacement in self.renames:
            tensor = re.sub(pattern, replacement, tensor)
        return tensor


ARCHITECTURES: Registry[Architecture] = Registry("architecture")


def register(*rows: Architecture) -> None:
    """Add rows to the table, under their names and aliases."""
    for row in rows:
        for name in (row.name, *row.aliases):
            ARCHITECTURES.add(name, row)
