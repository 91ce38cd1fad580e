"""chatglm (ChatGLM 2, 3 and GLM-4), glm4 (GLM-4-0414) and glm4moe (GLM-4.5 and 4.6)."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_glm(m: Metadata) -> dict[str, Any]:
    """The dense models. The converter multiplies rope.freq_base by rope_ratio."""
    return llama_config(m, partial_rotary=True) | {"attention_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_glm4_moe(m: Metadata) -> dict[str, Any]:
    """GLM-4.5 and 4.6. Layers that predict further tokens follow the model's own, and are not used."""
    config = _read_glm(m) | expert_config(m)
    config["num_hidden_layers"] -= m.get("nextn_predict_layers", int, 0)
    m.require_value("expert_gating_func", 2, 0)
    width = config["moe_intermediate_size"]
    return config | {
        "n_routed_experts": config.pop("num_experts"),
        "n_shared_experts": m.get("expert_shared_count", int, (shared_expert_width(m) or 0) // width if width else 0),
        "first_k_dense_replace": m.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": m.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": m.get("expert_weights_norm", bool, True),
        "n_group": m.get("expert_group_count", int, 1),
        "topk_group": m.get("expert_group_used_count", int, 1),
        "use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight"),
    }


ARCHITECTURES = (
    GGUFArchitecture(
        name="chatglm",
        model_types=("glm", "chatglm"),
        read_config=_read_glm,
        names=lambda tensors: {"mlp.up": "ffn_up"},
    ),
    GGUFArchitecture(name="glm4", model_types=("glm4",), read_config=_read_glm, names=lambda tensors: {"mlp.up": "ffn_up"}),
    GGUFArchitecture(
        name="glm4moe",
        model_types=("glm4_moe",),
        read_config=_read_glm4_moe,
        names=lambda tensors: {"mlp_norm": "post_attention_norm"},
        ignored_tensors=("blk.*.nextn.*",),
    ),
)
