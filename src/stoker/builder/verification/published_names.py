"""The tensors of a GGUF file under the names that a Hugging Face checkpoint of the model has, for a comparison with transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.conversion.convert import assemble_tensor
from stoker.builder.conversion.tensor_plan import TensorPlan, plan_tensors, tensors_of_names
from stoker.builder.prepare import read_model
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.models import resolve_architecture
from stoker.models.tensor_transforms import add_one, flatten, in_features_last, squeeze_conv, transpose_conv1d, ungroup_qkv


def read_published_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a GGUF checkpoint in float32. Raises ValueError for an architecture whose tensors cannot be converted back."""
    architecture, model = read_model(checkpoint)
    plans = plan_tensors(architecture, model, checkpoint.weights)
    published = tensors_of_names(resolve_architecture(checkpoint.config).tensor_names(model), model)
    tensors: dict[str, Tensor] = {}
    for name, plan in plans.items():
        tensors |= _separate(assemble_tensor(plan, checkpoint.weights, model, torch.float32), published[name], model)
    return tensors


def _separate(value: Tensor, plan: TensorPlan, model: ModelConfig) -> dict[str, Tensor]:
    """The checkpoint tensors from which `plan` makes the engine tensor `value`, by name."""
    if plan.transformed is not None:
        inverse = _INVERSES.get(plan.transformed.transform)
        if inverse is None or len(plan.sources[0]) != 1:
            raise ValueError(f"{plan.name} cannot be converted back to {', '.join(plan.sources[0])}")
        return {plan.sources[0][0]: inverse(value, model)}
    tensors: dict[str, Tensor] = {}
    for part, group in zip(value.unbind(0) if plan.stacked else (value,), plan.sources, strict=True):
        rows = plan.parts if len(plan.parts) == len(group) else (len(part) // len(group),) * len(group)
        tensors |= dict(zip(group, (part,) if len(group) == 1 else part.split(rows), strict=True))
    return tensors


def _group_qkv(value: Tensor, model: ModelConfig) -> Tensor:
    """The inverse of `ungroup_qkv`: rows in groups of the queries of a key-value head, its key and its value."""
    attention = model.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    q, k, v = value.unflatten(0, (-1, attention.head_size)).split((heads, kv_heads, kv_heads))
    grouped = [part.unflatten(0, (kv_heads, -1)) for part in (q, k, v)]
    return torch.cat(grouped, dim=1).flatten(0, 2)


# A function of models.tensor_transforms → its inverse.
_INVERSES: dict[Callable[..., Tensor], Callable[[Tensor, ModelConfig], Tensor]] = {
    add_one: lambda value, model: value - 1,
    flatten: lambda value, model: value,
    in_features_last: lambda value, model: value.transpose(1, 2) if value.dim() == 3 else value,
    squeeze_conv: lambda value, model: value.unsqueeze(1) if value.dim() == 2 else value,
    transpose_conv1d: lambda value, model: value.t() if value.dim() == 2 else value,
    ungroup_qkv: _group_qkv,
}
