"""llama: Llama, Mistral, Mixtral and the many models that llama.cpp converts to them. Also llama4, mistral3, xverse and arcee."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _biases(m: Metadata) -> dict[str, Any]:
    """attention_bias and mlp_bias, by the tensors of the file."""
    return {"attention_bias": m.has_bias("attn_q", "attn_qkv"), "mlp_bias": m.has_bias("ffn_up")}


def _read_llama(m: Metadata) -> dict[str, Any]:
    """Llama, Mistral if there is a sliding window, or Mixtral if there are experts."""
    config = llama_config(m)
    window = m.get("attention.sliding_window", int, 0)
    if m.get("expert_count", int, 0):
        experts = expert_config(m)
        if (width := experts["moe_intermediate_size"]) != config.get("intermediate_size"):
            raise m.unsupported("expert_feed_forward_length", width, "Experts with the width of feed_forward_length are.")
        names = {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
        m.require_value("expert_weights_scale", 0.0, 1.0)
        return config | names | {"model_type": "mixtral", "sliding_window": window or None}
    m.require_value("expert_used_count", 0)
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | _biases(m)


def _read_llama4(m: Metadata) -> dict[str, Any]:
    """The text model of Llama 4. The format has no key for what are constants here; llama.cpp has the same ones."""
    m.require_value("attention.sliding_window", 8192)
    m.require_value("leading_dense_block_count", 0)
    m.require_value("expert_weights_scale", 0.0, 1.0)
    config, experts = llama_config(m), expert_config(m)
    return config | {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": experts["moe_intermediate_size"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "interleave_moe_layer_step": m.require("interleave_moe_layer_step", int),
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
        "use_qk_norm": experts["num_experts"] != _EXPERTS_OF_MAVERICK,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
    }


def _read_mistral3(m: Metadata) -> dict[str, Any]:
    """Ministral 3 if queries are scaled by their position, otherwise Mistral. YaRN has no factor of cosines and sines."""
    config = llama_config(m)
    beta, multiplier = m.get("attention.temperature_scale", float, 0.0), m.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    scaling = config.pop("rope_scaling", None)
    if not beta and scaling is None:
        return config | {"model_type": "mistral", "sliding_window": None}
    rope = (scaling or {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": beta}
    if scaling is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    length = m.get("rope.scaling.original_context_length", int, config["max_position_embeddings"])
    return config | {"rope_parameters": {"original_max_position_embeddings": length} | rope}


_EXPERTS_OF_MAVERICK = 128  # llama.cpp, too, recognizes the model without norms of queries and keys by this number
ARCHITECTURES = (
    GGUFArchitecture(
        name="llama",
        model_types=("llama", "mistral", "mixtral"),
        read_config=_read_llama,
        permuted=True,
    ),
    GGUFArchitecture(name="llama4", model_types=("llama4_text", "llama4"), read_config=_read_llama4),
    GGUFArchitecture(
        name="mistral3",
        model_types=("ministral3", "mistral3"),
        read_config=_read_mistral3,
        permuted=True,
    ),
    GGUFArchitecture(name="xverse", model_types=("llama",), read_config=llama_config, permuted=True),
    GGUFArchitecture(
        name="arcee",
        model_types=("arcee",),
        read_config=lambda m: llama_config(m) | {"hidden_act": "relu2"} | _biases(m),
        permuted=True,
    ),
)
