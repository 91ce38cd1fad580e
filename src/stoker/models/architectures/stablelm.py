"""StableLM: Llama with layer norms and rotary on a quarter of each head. The 12B model has parallel layers and norms per head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_rope, replace_fields, require_values, with_defaults


@with_defaults(
    aliases={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
    vocab_size=50304, hidden_size=2560, intermediate_size=6912, num_attention_heads=32, num_key_value_heads=32,
    max_position_embeddings=4096,
    layer_norm_eps=1e-5, use_qkv_bias=False, qk_layernorm=False, use_parallel_residual=False,
)  # fmt: skip
def stablelm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a StableLM checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mlp_bias=False)
    size = hf["hidden_size"] // hf["num_attention_heads"]
    require_values(hf, head_dim=size)
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"], bias=True)
    per_head = bool(hf["qk_layernorm"])
    config = llama_config(
        hf,
        architecture="StableLmForCausalLM",
        qkv_bias=bool(hf["use_qkv_bias"]),
        rope=read_rope(hf, dim=size, partial=0.25),
        qk_norm=NormConfig(kind="layer", eps=hf["layer_norm_eps"]) if per_head else None,
        qk_norm_heads=per_head,
    )
    return replace_fields(config, layer={"norm": norm, "layout": "parallel" if hf["use_parallel_residual"] else "pre"}, norm=norm)


def stablelm_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of StableLM that make each engine module, by engine name; see `TensorNames`."""
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    block = "model.layers.{i}.self_attn"
    return llama_names(config) | {
        "layers.{i}.attention.q_norm": tuple(f"{block}.q_layernorm.norms.{head}" for head in range(attention.num_heads)),
        "layers.{i}.attention.k_norm": tuple(f"{block}.k_layernorm.norms.{head}" for head in range(attention.num_kv_heads)),
    }


ARCHITECTURES = (
    Architecture(
        name="StableLmForCausalLM",
        read_config=stablelm_config,
        tensor_names=stablelm_names,
        family="StableLM 3B, 2 (1.6B, 12B)",
        oracle="transformers",
        model_types=("stablelm", "stablelm_epoch"),
        aliases=("StableLMEpochForCausalLM",),
        ignored_tensors=IGNORED,
    ),
)
