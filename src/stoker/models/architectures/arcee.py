"""Arcee AFM: Llama with an MLP that squares a ReLU instead of multiplying by a gate."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import replace_fields, with_defaults


@with_defaults(
    hidden_size=2560, intermediate_size=18432, hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5,
)  # fmt: skip
def arcee_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an Arcee AFM checkpoint, from `hf`, the data of its config.json."""
    return without_gates(llama_config(hf, architecture="ArceeForCausalLM"))


def without_gates(config: ModelConfig) -> ModelConfig:
    """A copy of `config` whose MLPs are down(act(up(x)))."""
    mlps = [layer.mlp for layer in config.layers]
    return replace_fields(config, layer=lambda i: {"mlp": None if (mlp := mlps[i]) is None else msgspec.structs.replace(mlp, gated=False)})


def names_without_gates(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Llama without `gate_proj`, by engine name; see `TensorNames`."""
    return llama_names(config) | {"layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj"}


ARCHITECTURES = (
    Architecture(
        name="ArceeForCausalLM",
        read_config=arcee_config,
        tensor_names=names_without_gates,
        family="Arcee AFM",
        oracle="transformers",
        model_types=("arcee",),
        ignored_tensors=IGNORED,
    ),
)
