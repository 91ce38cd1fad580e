"""The recipe of an engine: the format of each linear, and the dtype of its KV cache."""

from __future__ import annotations

import fnmatch
import math
from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec
import torch

from stoker.core.specs import LinearSpec
from stoker.quant.format import FORMATS, Format
from stoker.quant.formats.dense import Dense

TILE = 16  # of matrix instructions: operands of other widths are slower, and FP8 ones are not supported
AS_STORED = "AS_STORED"  # the recipe of a pre-quantized checkpoint
KV_DTYPES = ("int8", "float8_e4m3fn")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """`default` is the format of every linear that may be quantized, except where its name matches a pattern of `overrides`."""

    default: Format = Dense()
    overrides: dict[str, Format] = {}  # fnmatch pattern of a linear's name → format; the first match applies
    kv_cache: str | None = None  # one of KV_DTYPES; None: the engine's dtype
    kv_scales: Literal["measured", "stored"] = "measured"  # by calibration, or read from the checkpoint
    name: str = "NO_QUANT"  # the requested name
    calibration: dict[str, Any] = {}  # data, size and seq_len of the calibration; empty without one

    def format_for(self, spec: LinearSpec) -> Format:
        """The format of the linear that `spec` declares."""
        for pattern, chosen in self.overrides.items():
            if fnmatch.fnmatchcase(spec.name, pattern):
                return chosen
        return self.default if spec.quantize else Dense()

    @property
    def shard_unit(self) -> int:
        """The number of which the rows and columns of each shard are a multiple: it covers whole scales, bytes and matrix tiles."""
        probe = LinearSpec(name="probe", in_features=4096, parts=(4096,))
        layouts = [part for chosen in (self.default, *self.overrides.values()) for part in chosen.layout(probe, torch.float32).values()]
        return math.lcm(TILE, *(unit for part in layouts for unit in (part.row_unit, part.col_unit)))


def encode_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON data. Fields that earlier versions did not have are left out by default, so that engines keep their identity."""
    data: dict[str, Any] = msgspec.to_builtins(recipe)
    if recipe.kv_scales == "measured":
        del data["kv_scales"]
    return data


def decode_recipe(data: dict[str, Any]) -> Recipe:
    """The inverse of `encode_recipe`. Raises msgspec.ValidationError naming the path of an invalid value."""
    union: Any = reduce(or_, (FORMATS.get(name) for name in FORMATS))
    formats: dict[str, Any] = {"default": union, "overrides": dict[str, union]}
    stored = [(field.name, formats.get(field.name, field.type), None) for field in msgspec.structs.fields(Recipe)]
    read = msgspec.convert(data, msgspec.defstruct("StoredRecipe", stored))
    return Recipe(**{name: getattr(read, name) for name in Recipe.__struct_fields__ if name in data})
