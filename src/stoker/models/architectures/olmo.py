"""OLMo 1 and OLMoE. OLMo 1 is Llama with layer norms without weights; OLMoE has experts, and q/k norms over all heads together."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.qwen2 import qwen2_moe_names, with_experts
from stoker.models.config_fields import replace_fields, require_values, with_defaults


@with_defaults(vocab_size=50304, max_position_embeddings=2048)
def olmo_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMo 1 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_bias=False)
    norm = NormConfig(kind="layer", eps=1e-5, weight=False)
    config = llama_config(hf, architecture="OlmoForCausalLM", clip_qkv=hf.get("clip_qkv"))
    return replace_fields(config, layer={"norm": norm}, norm=norm)


@with_defaults(
    vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
    max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts_per_tok=8, num_experts=64,
)  # fmt: skip
def olmoe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMoE checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, clip_qkv=None, mlp_bias=False)  # the engine clips before the norms, OLMoE after them
    norm = NormConfig(eps=hf["rms_norm_eps"])
    config = llama_config(hf, architecture="OlmoeForCausalLM", qk_norm=norm, qk_norm_full=True)
    return with_experts(config, hf | {"moe_intermediate_size": hf["intermediate_size"]}, num_experts=hf["num_experts"])


ARCHITECTURES = (
    Architecture(
        name="OlmoForCausalLM",
        read_config=olmo_config,
        tensor_names=llama_names,
        family="OLMo 1",
        oracle="transformers",
        model_types=("olmo",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="OlmoeForCausalLM",
        read_config=olmoe_config,
        tensor_names=qwen2_moe_names,
        family="OLMoE",
        oracle="transformers",
        model_types=("olmoe",),
        ignored_tensors=IGNORED,
    ),
)
