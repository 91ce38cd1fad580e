"""Reads the sizes of a head's decoder layers from its config.json, which describes them as a small Llama or Qwen model."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import ModelConfig
from stoker.models.architectures.llama import llama_names
from stoker.models.config_reader import read_model_config
from stoker.models.registry import resolve_architecture

# Keys of heads, which are read elsewhere or describe their training. Tensors show whether there are biases.
HEAD_KEYS = (
    "draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", "speculators_config", "speculators_model_type",
    "speculators_version", "has_no_defaults_at_init", "bias", "mask_token_id", "target_model_type", "layer_types", "max_window_layers",
    "sliding_window", "use_sliding_window",
)  # fmt: skip
_CURE = "Heads of this variant are not supported."


def read_layers(path: object, hf: dict[str, Any]) -> ModelConfig:
    """The config of a head's layers, as that of a model that consists of them. Raises CheckpointError for unsupported values."""
    _check_no_window(path, hf)
    bare = {key: value for key, value in hf.items() if key != "architectures"}
    row = resolve_architecture({"model_type": "llama"} | bare)
    config = read_model_config(row, bare, HEAD_KEYS)
    if row.tensor_names is not llama_names:
        raise CheckpointError(f"{path}: heads with layers of {row.name} are not supported.", cure="Heads have layers of Llama or Qwen.")
    return config


def _check_no_window(path: object, hf: dict[str, Any]) -> None:
    """Raise CheckpointError for attention with a window, which heads do not have. Qwen's `sliding_window` has an effect only if enabled."""
    if hf.get("use_sliding_window") not in (None, False):
        raise CheckpointError(
            f"{path}: use_sliding_window={str(hf['use_sliding_window'])[:60]!r} is not supported, only false.", cure=_CURE
        )
    kinds = hf.get("layer_types")
    count = hf.get("num_hidden_layers")
    used = kinds[: count if type(count) is int else None] if isinstance(kinds, list) else [kinds]
    if kinds is not None and any(kind != "full_attention" for kind in used):
        raise CheckpointError(f"{path}: layer_types={str(kinds)[:60]!r} is not supported, only full_attention.", cure=_CURE)


def check_size(path: object, key: str, value: Any) -> None:
    """Raise CheckpointError unless a size of heads is a positive whole number of at most 24 bits, or absent (None)."""
    if value is not None and (type(value) is not int or not 1 <= value <= 1 << 24):
        raise CheckpointError(f"{path}: {key}={str(value)[:60]!r} is not a positive whole number.", cure="Download the heads again.")


def check_flags(path: object, settings: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise CheckpointError unless each of `keys` is true, false or absent."""
    for key in keys:
        if type(settings.get(key)) not in (bool, type(None)):
            raise CheckpointError(f"{path}: {key}={str(settings[key])[:60]!r} is not true or false.", cure="Download the heads again.")
