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
    "draft_vocab_size", "target_hidden_size", "eagle_config*", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", "speculators_*", "has_no_defaults_at_init", "bias", "mask_token_id",
    "target_model_type", "layer_types", "max_window_layers", "sliding_window", "use_sliding_window",
)  # fmt: skip


def read_layers(path: object, hf: dict[str, Any]) -> ModelConfig:
    """The config of a head's layers, as that of a model that consists of them. Raises CheckpointError for unsupported values."""
    bare = {key: value for key, value in hf.items() if key != "architectures"}
    row = resolve_architecture({"model_type": "llama"} | bare)
    config = read_model_config(row, bare, HEAD_KEYS)
    if row.tensor_names is not llama_names:
        raise CheckpointError(f"{path}: heads with layers of {row.name} are not supported.", cure="Heads have layers of Llama or Qwen.")
    return config
