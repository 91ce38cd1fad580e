"""GLM-4.5 and 4.6: the attention of GLM-4 with rotary halves and optional norms per head, and the experts of DeepSeek V3."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.deepseek import deepseek_names, with_corrected_experts
from stoker.models.architectures.llama import IGNORED, llama_config
from stoker.models.config_fields import read_head_size, read_rope, require_values, with_defaults


@with_defaults(
    vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8,
    max_position_embeddings=131072, rms_norm_eps=1e-5, moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1,
    n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
    use_qk_norm=False,
)  # fmt: skip
def glm4_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a GLM-4.5 or 4.6 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_bias=False, moe_layer_freq=1)
    config = llama_config(
        hf,
        architecture="Glm4MoeForCausalLM",
        rope=read_rope(hf, dim=read_head_size(hf), partial=0.5),
        qk_norm=NormConfig(eps=hf["rms_norm_eps"]) if hf["use_qk_norm"] else None,
        out_bias=False,
    )
    return with_corrected_experts(config, hf)


ARCHITECTURES = (
    Architecture(
        name="Glm4MoeForCausalLM",
        read_config=glm4_moe_config,
        tensor_names=deepseek_names,
        family="GLM-4.5, 4.6 (MoE)",
        oracle="transformers",
        model_types=("glm4_moe",),
        ignored_tensors=(*IGNORED, "model.layers.46.*", "model.layers.92.*"),  # the multi-token prediction layer of Air and of 4.5 and 4.6
        ignored_keys=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
)
