"""Phi-3 and Phi-4: Llama with fused qkv and gate_up weights, and longrope; the mini models rotate part of each head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_rope, require_values, value_or, with_defaults


@with_defaults(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_attention_heads=32, max_position_embeddings=4096,
    original_max_position_embeddings=4096, rms_norm_eps=1e-5,
)  # fmt: skip
def phi3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Phi-3 or Phi-4 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)  # in files of Phi-4-mini
    rope = read_rope(_with_current_name(hf), dim=read_head_size(hf), partial=1.0)
    return llama_config(hf, architecture="Phi3ForCausalLM", window=hf.get("sliding_window"), rope=rope)


def _with_current_name(hf: dict[str, Any]) -> dict[str, Any]:
    """`hf` with the current name of longrope. Early files of long contexts have the type `yarn`, but the divisors of longrope."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = value_or(hf, key, {})
        if "yarn" in (scaling.get("rope_type"), scaling.get("type")) and scaling.get("long_factor"):
            hf = hf | {key: scaling | {"rope_type": "longrope"}}
    return hf


def phi3_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Phi-3 or Phi-4 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    return llama_names(config) | {
        "layers.{i}.attention.qkv": f"{layer}.self_attn.qkv_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.gate_up_proj",
    }


ARCHITECTURES = (
    Architecture(
        name="Phi3ForCausalLM",
        read_config=phi3_config,
        tensor_names=phi3_names,
        family="Phi-3, Phi-4",
        oracle="transformers",
        model_types=("phi3",),
        ignored_tensors=IGNORED,
        ignored_keys=("original_max_position_embeddings",),
    ),
)
