"""Recipes by the names that users write: `--quantize`, and the settings of Truss, LMI and Triton folders."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.config import check_choice
from stoker.base.errors import ConfigError
from stoker.base.registry import Registry
from stoker.quant.format import Format
from stoker.quant.formats.awq import AWQ
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.gptq import GPTQ
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.smoothquant import SmoothQuant
from stoker.quant.recipe import AS_STORED, KV_DTYPES, Recipe

# Narrower models lose more by rounding, and calibrating wider ones takes time that grows with the square of their width.
NARROW_HIDDEN_SIZE = 1024


class NamedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """One row of RECIPES: the recipe of one name."""

    format: Format
    kv_cache: str | None = None
    max_perplexity_increase: float = 0.0  # relative; above it the build fails. docs/quantization.md has measured figures
    narrow: dict[str, Any] = {}  # settings of the format for models whose hidden_size is at most NARROW_HIDDEN_SIZE
    overrides: dict[str, Format] = {}  # of the embedding and the head: a fifth of a small model, and 6 % of what an 8B step reads


_INT8_EMBEDDING_AND_HEAD: dict[str, Format] = {"embed": Int8(), "head": Int8()}
# A head that is also the embedding stays unquantized. A separate head costs 3 % of perplexity in e4m3, and nothing measurable in int8
# (benchmarks/results/accuracy_untied_head.json).
_INT8_HEAD: dict[str, Format] = {"head": Int8()}
RECIPES: Registry[NamedRecipe] = Registry("quantization")
for _name, _row in {
    "NO_QUANT": NamedRecipe(format=Dense(), max_perplexity_increase=0.01),
    "WEIGHTS_ONLY_INT8": NamedRecipe(format=Int8(), max_perplexity_increase=0.03, overrides=_INT8_EMBEDDING_AND_HEAD),
    "WEIGHTS_KV_INT8": NamedRecipe(format=Int8(), kv_cache="int8", max_perplexity_increase=0.04, overrides=_INT8_EMBEDDING_AND_HEAD),
    "WEIGHTS_ONLY_INT4": NamedRecipe(format=Int4(group_size=32), max_perplexity_increase=0.35, overrides=_INT8_EMBEDDING_AND_HEAD),
    "WEIGHTS_KV_INT4": NamedRecipe(
        format=Int4(group_size=32), kv_cache="int8", max_perplexity_increase=0.35, overrides=_INT8_EMBEDDING_AND_HEAD
    ),
    "AWQ": NamedRecipe(format=AWQ(), max_perplexity_increase=0.35, overrides=_INT8_EMBEDDING_AND_HEAD),
    "GPTQ": NamedRecipe(format=GPTQ(), max_perplexity_increase=0.35, overrides=_INT8_EMBEDDING_AND_HEAD),
    "SMOOTH_QUANT": NamedRecipe(format=SmoothQuant(), max_perplexity_increase=0.15),
    "FP8": NamedRecipe(format=Fp8(), max_perplexity_increase=0.05, narrow={"compensate": True}, overrides=_INT8_HEAD),
    "FP8_KV": NamedRecipe(
        format=Fp8(), kv_cache="float8_e4m3fn", max_perplexity_increase=0.05, narrow={"compensate": True}, overrides=_INT8_HEAD
    ),
    "FP8_BLOCK": NamedRecipe(format=BlockFp8(), max_perplexity_increase=0.05),
}.items():
    RECIPES.add(_name, _row)

# Other spellings, in lower case.
ALIASES = {
    "none": "NO_QUANT", "as_stored": AS_STORED, "weights_int8": "WEIGHTS_ONLY_INT8", "int8": "WEIGHTS_ONLY_INT8",
    "weights_int4": "WEIGHTS_ONLY_INT4", "int4": "WEIGHTS_ONLY_INT4", "weights_int4_kv_int8": "WEIGHTS_KV_INT4",
    "int4_awq": "AWQ", "smoothquant": "SMOOTH_QUANT",
}  # fmt: skip


def canonical_recipe_name(name: str) -> str:
    """The key of RECIPES for a name in any spelling and case, or an alias. Unknown names are returned unchanged."""
    lower = name.lower()
    return ALIASES.get(lower, next((row for row in RECIPES if row.lower() == lower), name))


def find_recipe(name: str | None, settings: dict[str, Any] | None = None, kv_cache: str | None = None, narrow: bool = False) -> Recipe:
    """The recipe called `name`, with `settings` for fields of its format and `kv_cache` for its cache (auto: the engine's dtype).

    `narrow`: whether the model has at most NARROW_HIDDEN_SIZE features and can be calibrated. Raises ConfigError for unknown names,
    settings that the format does not have, and values out of range.
    """
    chosen = canonical_recipe_name(name or "NO_QUANT")
    row = RECIPES.get(chosen)
    if kv_cache is not None:
        check_choice("kv_cache_dtype", kv_cache, ("auto", *KV_DTYPES))
    stored = row.kv_cache if kv_cache is None else None if kv_cache == "auto" else kv_cache
    requested = (row.narrow if narrow else {}) | (settings or {})
    return Recipe(default=_with_settings(row.format, chosen, requested), overrides=dict(row.overrides), kv_cache=stored, name=chosen)


def _with_settings(chosen: Format, name: str, settings: dict[str, Any]) -> Format:
    """The format `chosen` with some fields replaced. Raises ConfigError for an unknown field or a value of the wrong type."""
    fields = {f.name for f in msgspec.structs.fields(type(chosen))}
    unknown = sorted(set(settings) - fields)
    if unknown:
        known = ", ".join(sorted(fields)) or "none"
        raise ConfigError(f"{name} has no setting {unknown[0]!r}.", cure=f"Its settings: {known}.")
    try:
        return msgspec.convert({**msgspec.structs.asdict(chosen), **settings}, type(chosen), strict=False)
    except msgspec.ValidationError as problem:
        raise ConfigError(f"{name}: {problem}.", cure="Correct the setting.") from None


def max_perplexity_increase(name: str) -> float:
    """The relative increase of perplexity over the checkpoint that a build with this recipe permits by default."""
    return RECIPES.get(name).max_perplexity_increase if name in RECIPES else 0.05
