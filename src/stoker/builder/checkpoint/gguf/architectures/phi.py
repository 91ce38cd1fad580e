"""phi2 (Phi-1 to Phi-2), phi3 (Phi-3 and Phi-4) and phimoe (Phi-3.5-MoE)."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, layer_norm_config, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_phi2(m: Metadata) -> dict[str, Any]:
    """Phi-1, Phi-1.5 and Phi-2. llama.cpp's converter has no other width than four times the hidden size."""
    return layer_norm_config(m, partial_rotary=True) | {"hidden_act": "gelu_new", "qk_layernorm": False}


def _read_phi3(m: Metadata) -> dict[str, Any]:
    """Phi-3 and Phi-4. A sliding window of 0 means full attention."""
    config = llama_config(m, partial_rotary=True)
    original = m.get("rope.scaling.original_context_length", int, config.get("max_position_embeddings"))
    return config | {"sliding_window": m.get("attention.sliding_window", int) or None, "original_max_position_embeddings": original}


def _read_phimoe(m: Metadata) -> dict[str, Any]:
    """Phi-3.5-MoE, whose layer norms have the epsilon of RMS norms. Experts are chosen as by its publisher, not as in llama.cpp."""
    config, experts = llama_config(m), expert_config(m)
    if (width := experts["moe_intermediate_size"]) != config.get("intermediate_size"):
        raise m.unsupported("expert_feed_forward_length", width, "Experts with the width of feed_forward_length are.")
    original = m.get("rope.scaling.original_context_length", int, config["max_position_embeddings"])
    if (scaling := config.get("rope_scaling")) is not None:
        factor = scaling.pop("attention_factor", 1.0)
        scaling |= {"short_mscale": factor, "long_mscale": factor}
    return config | {
        "sliding_window": m.get("attention.sliding_window", int) or None,
        "original_max_position_embeddings": original,
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
        "lm_head_bias": m.has_tensor("output.bias"),
    }


ARCHITECTURES = (
    GGUFArchitecture(name="phi2", model_types=("phi",), read_config=_read_phi2),
    GGUFArchitecture(name="phi3", model_types=("phi3",), read_config=_read_phi3, names=lambda tensors: {"mlp.up": "ffn_up"}),
    GGUFArchitecture(name="phimoe", model_types=("phimoe",), read_config=_read_phimoe),
)
