"""Qwen 2 and 2.5: Llama with biases on q, k and v. Qwen2-MoE adds a shared expert behind a gate."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import activation, defaults, revise


@defaults(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768, max_window_layers=28, sliding_window=4096)
def qwen2_config(hf: dict[str, Any]) -> ModelConfig:
    return windowed(llama_config(hf, architecture="Qwen2ForCausalLM", qkv_bias=True, out_bias=False), hf)


def windowed(config: ModelConfig, hf: dict[str, Any]) -> ModelConfig:
    """With use_sliding_window, the layers from max_window_layers on are local (or those that layer_types lists)."""
    if not hf.get("use_sliding_window") or not hf.get("sliding_window"):
        return config
    first = hf["max_window_layers"]
    kinds = hf.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(config.num_layers)]
    return revise(config, attention=lambda i: {"window": hf["sliding_window"] if kinds[i] == "sliding_attention" else None})


@defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
    num_key_value_heads=16, max_position_embeddings=32768, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    num_experts=60, num_experts_per_tok=4, qkv_bias=True, max_window_layers=28, sliding_window=4096,
)  # fmt: skip
def qwen2_moe_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="Qwen2MoeForCausalLM", qkv_bias=bool(hf["qkv_bias"]), out_bias=False)
    if hf.get("use_sliding_window") and not hf.get("layer_types"):
        kinds = ["sliding_attention" if i % 2 == 0 and i < hf["max_window_layers"] else "full_attention" for i in range(config.num_layers)]
        hf = hf | {"layer_types": kinds}
    shared = MLPConfig(size=hf["shared_expert_intermediate_size"], activation=activation(hf))
    return sparse(windowed(config, hf), hf, experts=hf["num_experts"], shared=shared, shared_gate=True)


def sparse(config: ModelConfig, hf: dict[str, Any], *, experts: int, **moe: Any) -> ModelConfig:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    mlp = MoEConfig(
        num_experts=experts,
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["moe_intermediate_size"], activation=activation(hf)),
        renormalize=bool(hf.get("norm_topk_prob", False)),
        **moe,
    )
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return revise(config, layer=lambda i: {"mlp": mlp} if i not in dense and (i + 1) % step == 0 else {})


def qwen2_moe_names(config: ModelConfig) -> Names:
    moe = "model.layers.{i}.mlp"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.gate",
        "layers.{i}.mlp.experts.up": (f"{moe}.experts.{{e}}.gate_proj", f"{moe}.experts.{{e}}.up_proj"),
        "layers.{i}.mlp.experts.down": f"{moe}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": (f"{moe}.shared_expert.gate_proj", f"{moe}.shared_expert.up_proj"),
        "layers.{i}.mlp.shared.down": f"{moe}.shared_expert.down_proj",
        "layers.{i}.mlp.shared_gate": f"{moe}.shared_expert_gate",
    }


register(
    Architecture("Qwen2ForCausalLM", qwen2_config, llama_names, "Qwen 2, 2.5", "transformers", model_types=("qwen2",), ignored=IGNORED),
    Architecture(
        "Qwen2MoeForCausalLM", qwen2_moe_config, qwen2_moe_names, "Qwen 1.5/2 MoE", "transformers", ("qwen2_moe",), ignored=IGNORED
    ),
)
