"""Quantizations by the names people use: what `--quantize`, Truss, LMI and Triton folders ask for."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.config import check_choice
from stoker.base.errors import ConfigError
from stoker.base.registry import Registry
from stoker.quant.awq import AWQ
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.dense import Dense
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.gptq import GPTQ
from stoker.quant.int4 import Int4
from stoker.quant.int8 import Int8
from stoker.quant.recipe import AS_STORED, KV_DTYPES, Recipe
from stoker.quant.smoothquant import SmoothQuant

# What rounding costs falls with a model's width, and what calibration takes grows with its square.
NARROW = 1024


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """One named quantization."""

    format: Format
    kv_cache: str | None = None
    max_perplexity_increase: float = 0.0  # above this share the build refuses; measured figures are in docs/quantization.md
    narrow: dict[str, Any] = {}  # settings of models whose hidden_size is at most NARROW
    outer: dict[str, Format] = {}  # formats of the embedding and the head: a fifth of a small model, and 6 % of what an 8B step reads


_INT8_OUTER: dict[str, Format] = {"embed": Int8(), "head": Int8()}
# A head of its own; one that is also the embedding's table stays as built. In e4m3 it costs 3 % by itself, in int8 nothing that can be
# measured (SmolLM2 with a head of its own, benchmarks/results/accuracy_untied_head.json).
_FP8_OUTER: dict[str, Format] = {"head": Int8()}
RECIPES: Registry[Named] = Registry("quantization")
for _name, _row in {
    "NO_QUANT": Named(format=Dense(), max_perplexity_increase=0.01),
    "WEIGHTS_ONLY_INT8": Named(format=Int8(), max_perplexity_increase=0.03, outer=_INT8_OUTER),
    "WEIGHTS_KV_INT8": Named(format=Int8(), kv_cache="int8", max_perplexity_increase=0.04, outer=_INT8_OUTER),
    "WEIGHTS_ONLY_INT4": Named(format=Int4(group_size=32), max_perplexity_increase=0.35, outer=_INT8_OUTER),
    "WEIGHTS_KV_INT4": Named(format=Int4(group_size=32), kv_cache="int8", max_perplexity_increase=0.35, outer=_INT8_OUTER),
    "AWQ": Named(format=AWQ(), max_perplexity_increase=0.35, outer=_INT8_OUTER),
    "GPTQ": Named(format=GPTQ(), max_perplexity_increase=0.35, outer=_INT8_OUTER),
    "SMOOTH_QUANT": Named(format=SmoothQuant(), max_perplexity_increase=0.15),
    "FP8": Named(format=Fp8(), max_perplexity_increase=0.05, narrow={"compensate": True}, outer=_FP8_OUTER),
    "FP8_KV": Named(format=Fp8(), kv_cache="float8_e4m3fn", max_perplexity_increase=0.05, narrow={"compensate": True}, outer=_FP8_OUTER),
    "FP8_BLOCK": Named(format=BlockFp8(), max_perplexity_increase=0.05),
}.items():
    RECIPES.add(_name, _row)

# Other spellings, in lower case.
ALIASES = {
    "none": "NO_QUANT", "as_stored": AS_STORED, "weights_int8": "WEIGHTS_ONLY_INT8", "int8": "WEIGHTS_ONLY_INT8",
    "weights_int4": "WEIGHTS_ONLY_INT4", "int4": "WEIGHTS_ONLY_INT4", "weights_int4_kv_int8": "WEIGHTS_KV_INT4",
    "int4_awq": "AWQ", "smoothquant": "SMOOTH_QUANT",
}  # fmt: skip


def canonical(name: str) -> str:
    """The row's name for any spelling, in any case."""
    lower = name.lower()
    return ALIASES.get(lower, next((row for row in RECIPES if row.lower() == lower), name))


def find_recipe(name: str | None, settings: dict[str, Any] | None = None, kv_cache: str | None = None, narrow: bool = False) -> Recipe:
    """The recipe of a name, with `settings` in place of its format's fields and `kv_cache` (auto: the engine's dtype) of its own.

    `narrow`: for a model of at most NARROW features that can be calibrated.

    Raises ConfigError for unknown names, settings that the format does not have, and values out of range.
    """
    chosen = canonical(name or "NO_QUANT")
    row = RECIPES.get(chosen)
    if kv_cache is not None:
        check_choice("kv_cache_dtype", kv_cache, ("auto", *KV_DTYPES))
    stored = row.kv_cache if kv_cache is None else None if kv_cache == "auto" else kv_cache
    wanted = (row.narrow if narrow else {}) | (settings or {})
    return Recipe(default=_with(row.format, chosen, wanted), overrides=dict(row.outer), kv_cache=stored, name=chosen)


def _with(chosen: Format, name: str, settings: dict[str, Any]) -> Format:
    fields = {f.name for f in msgspec.structs.fields(type(chosen))}
    unknown = sorted(set(settings) - fields)
    if unknown:
        known = ", ".join(sorted(fields)) or "none"
        raise ConfigError(f"{name} has no setting {unknown[0]!r}.", cure=f"Its settings: {known}.")
    try:
        return msgspec.convert({**msgspec.structs.asdict(chosen), **settings}, type(chosen), strict=False)
    except msgspec.ValidationError as problem:
        raise ConfigError(f"{name}: {problem}.", cure="Correct the setting.") from None


def limit(name: str) -> float:
    """The share by which a recipe's perplexity may exceed the checkpoint's, unless the build is told otherwise."""
    return RECIPES.get(name).max_perplexity_increase if name in RECIPES else 0.05
