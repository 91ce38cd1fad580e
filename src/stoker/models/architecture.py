"""What an architecture file declares: how its config.json reads, and which checkpoint tensors make each engine tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stoker.base.registry import Registry
from stoker.layers.config import ModelConfig

# HF config.json data → ModelConfig.
ReadConfig = Callable[[dict[str, Any]], ModelConfig]


@dataclass(frozen=True, slots=True)
class Custom:
    """An engine tensor made by a function. `combine` gets the sources' tensors in order; their names may hold {i} and {e}."""

    sources: tuple[str, ...]
    combine: Callable[[list[Tensor], ModelConfig], Tensor]


# Engine name → checkpoint name(s). Names are of modules: ".weight" and ".bias" follow on both sides.
# "{i}" is the layer, "{e}" the expert (stacked along a new first axis). A tuple is concatenated along rows.
# A name that ends in a tensor suffix itself (".weight", ".bias", or listed in full) is taken as it stands.
Names = dict[str, str | tuple[str, ...] | Custom]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family: a row of ARCHITECTURES under each name that config.json may give."""

    name: str
    config: ReadConfig
    names: Callable[[ModelConfig], Names]
    ignored: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that carry no weights (rotary tables, masks)
    optional: tuple[str, ...] = field(default=())  # checkpoint tensors that may be absent or present (a tied head)


ARCHITECTURES: Registry[Architecture] = Registry("architecture")
