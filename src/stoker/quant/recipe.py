"""Which format each linear of an engine has, and what the KV cache stores."""

from __future__ import annotations

import fnmatch
import math
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import torch

from stoker.core.specs import LinearSpec
from stoker.quant.dense import Dense
from stoker.quant.format import FORMATS, Format

TILE = 16  # of the matrix units: operands of other widths are slower, or refused by the FP8 ones
AS_STORED = "AS_STORED"  # the recipe of weights that a checkpoint holds in few bits already
KV_DTYPES = ("int8", "float8_e4m3fn")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """`default` for every linear that may be quantized, but for those whose name matches a pattern of `overrides` (first match wins)."""

    default: Format = Dense()
    overrides: dict[str, Format] = {}  # fnmatch pattern of a linear's name → format
    kv_cache: str | None = None  # one of KV_DTYPES; None: the engine's dtype
    name: str = "NO_QUANT"  # what the user asked for
    calibration: dict[str, Any] = {}  # what was measured on: data, size, seq_len; empty where nothing is

    def format_for(self, spec: LinearSpec) -> Format:
        for pattern, chosen in self.overrides.items():
            if fnmatch.fnmatchcase(spec.name, pattern):
                return chosen
        return self.default if spec.quantize else Dense()

    @property
    def grain(self) -> int:
        """Rows and columns that ranks share are multiples of this: of every unit that a scale or a byte covers, and of a matrix tile."""
        probe = LinearSpec(name="probe", in_features=4096, parts=(4096,))
        layouts = [part for chosen in (self.default, *self.overrides.values()) for part in chosen.layout(probe, torch.float32).values()]
        return math.lcm(TILE, *(unit for part in layouts for unit in (part.row_unit, part.col_unit)))


def encode(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON data."""
    return msgspec.to_builtins(recipe)


def decode(data: dict[str, Any]) -> Recipe:
    """The inverse of `encode`. Raises msgspec.ValidationError naming the path of a wrong value."""
    union: Any = reduce(or_, (FORMATS.get(name) for name in FORMATS))
    formats = msgspec.convert(data.get("overrides", {}), dict[str, union])
    default = msgspec.convert(data.get("default", {"format": "dense"}), union)
    plain = {key: data[key] for key in ("kv_cache", "name", "calibration") if key in data}
    return Recipe(default=default, overrides=formats, **plain)
