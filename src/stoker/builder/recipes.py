"""What `--quantize` names: one row a recipe."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.quant.recipe import Recipe

RECIPES: Registry[Recipe] = Registry("quantization")
RECIPES.add("NO_QUANT", Recipe())
