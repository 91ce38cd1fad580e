"""Names, shapes and dtypes of the tensors that an engine stores, before they are divided among ranks."""

from __future__ import annotations

import torch

from stoker.core.specs import LinearSpec, Spec
from stoker.quant.format import Layout
from stoker.quant.recipe import Recipe


def stored_layouts(spec: Spec, recipe: Recipe, dtype: torch.dtype) -> dict[str, Layout]:
    """The layouts of the stored tensors of one spec, by engine name. `dtype` is that of tensors that are not quantized."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: Layout(spec.shape, getattr(torch, spec.dtype) if spec.dtype else dtype, row_axis=0)}
    stored = {f"{spec.name}.{suffix}": layout for suffix, layout in recipe.format_for(spec).layout(spec, dtype).items()}
    return stored | {f"{spec.name}.bias": Layout(spec.bias_shape, dtype, row_axis=len(spec.bias_shape) - 1)} if spec.bias else stored
