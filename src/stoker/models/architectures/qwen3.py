"""Qwen 3: Llama with norms on the queries and keys of each head. Qwen3-MoE adds experts without a shared one."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.qwen2 import WINDOW_KEYS, qwen2_moe_names, with_experts, with_sliding_window
from stoker.models.config_fields import replace_fields, with_defaults


@with_defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
    max_window_layers=28, sliding_window=4096,
)  # fmt: skip
def qwen3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 3 checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    return with_sliding_window(llama_config(hf, architecture="Qwen3ForCausalLM", qk_norm=norm), hf)


@with_defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, moe_intermediate_size=768, num_experts_per_tok=8,
    sliding_window=4096,
)  # fmt: skip
def qwen3_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen3-MoE checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    config = llama_config(hf, architecture="Qwen3MoeForCausalLM", qk_norm=norm)
    if hf.get("use_sliding_window"):
        config = replace_fields(config, attention={"window": hf["sliding_window"]})
    return with_experts(config, hf, num_experts=hf.get("num_experts") or hf.get("num_local_experts") or 128)


ARCHITECTURES = (
    Architecture(
        name="Qwen3ForCausalLM",
        read_config=qwen3_config,
        tensor_names=llama_names,
        family="Qwen 3",
        oracle="transformers",
        model_types=("qwen3",),
        ignored_tensors=IGNORED,
        ignored_keys=WINDOW_KEYS,
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        read_config=qwen3_moe_config,
        tensor_names=qwen2_moe_names,
        family="Qwen 3 MoE",
        oracle="transformers",
        model_types=("qwen3_moe",),
        ignored_tensors=IGNORED,
        ignored_keys=WINDOW_KEYS,
    ),
)
