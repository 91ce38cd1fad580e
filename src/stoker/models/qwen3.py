"""Qwen 3: Llama with norms on each head's queries and keys. Qwen3-MoE: experts without a shared one."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.qwen2 import qwen2_moe_names, sparse, windowed
from stoker.models.read import defaults, revise


@defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
    max_window_layers=28, sliding_window=4096,
)  # fmt: skip
def qwen3_config(hf: dict[str, Any]) -> ModelConfig:
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    return windowed(llama_config(hf, architecture="Qwen3ForCausalLM", qk_norm=norm), hf)


@defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, moe_intermediate_size=768, num_experts_per_tok=8,
    sliding_window=4096,
)  # fmt: skip
def qwen3_moe_config(hf: dict[str, Any]) -> ModelConfig:
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    config = llama_config(hf, architecture="Qwen3MoeForCausalLM", qk_norm=norm)
    if hf.get("use_sliding_window"):
        config = revise(config, attention={"window": hf["sliding_window"]})
    return sparse(config, hf, experts=hf.get("num_experts") or hf.get("num_local_experts") or 128)


register(
    Architecture("Qwen3ForCausalLM", qwen3_config, llama_names, "Qwen 3", "transformers", model_types=("qwen3",), ignored=IGNORED),
    Architecture("Qwen3MoeForCausalLM", qwen3_moe_config, qwen2_moe_names, "Qwen 3 MoE", "transformers", ("qwen3_moe",), ignored=IGNORED),
)
