"""llama: Llama, Mistral, Mixtral and the many models that llama.cpp converts to them. Also xverse and arcee."""

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


ARCHITECTURES = (
    GGUFArchitecture(
        name="llama",
        model_types=("llama", "mistral", "mixtral"),
        read_config=_read_llama,
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
