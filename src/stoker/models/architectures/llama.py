"""Llama 1 to 3.x, and the helpers for the many families that differ from Llama in a few fields."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.config_fields import (
    read_activation,
    read_head_size,
    read_max_positions,
    read_rope,
    require_values,
    value_or,
    with_defaults,
)

IGNORED = ("*.rotary_emb.inv_freq",)


@with_defaults(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
def llama_config(hf: dict[str, Any], *, architecture: str = "LlamaForCausalLM", **attention: Any) -> ModelConfig:
    """The ModelConfig of a Llama-like model. `attention` are fields that replace those of every layer's AttentionConfig."""
    require_values(hf, rope_interleaved=False)
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    size = read_head_size(hf)
    bias = bool(hf.get("attention_bias", False))
    settings: dict[str, Any] = {
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": value_or(hf, "num_key_value_heads", hf["num_attention_heads"]),
        "head_size": size,
        "qkv_bias": bias,
        "out_bias": bias,
    } | attention
    if "rope" not in settings:
        settings["rope"] = read_rope(hf, dim=size)
    bias = bool(hf.get("mlp_bias", False))
    mlp = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf), up_bias=bias, down_bias=bias)
    layer = LayerConfig(attention=AttentionConfig(**settings), mlp=mlp, norm=norm)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=read_max_positions(hf, settings["rope"]),
        layers=(layer,) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf.get("tie_word_embeddings", False)),
    )


def llama_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Llama that make each engine module, by engine name; see `TensorNames`."""
    attention, mlp = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
    return {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.attention.qkv": (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        "layers.{i}.attention.out": f"{attention}.o_proj",
        "layers.{i}.attention.q_norm": f"{attention}.q_norm",
        "layers.{i}.attention.k_norm": f"{attention}.k_norm",
        "layers.{i}.mlp.up": (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "layers.{i}.mlp.down": f"{mlp}.down_proj",
    }


ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        read_config=llama_config,
        tensor_names=llama_names,
        family="Llama 1, 2, 3.x, DeepSeek LLM, Yi, SmolLM2, XVERSE, Aquila 1 and 2",
        oracle="transformers",
        model_types=("llama", "xverse", "aquila"),
        aliases=("LLaMAForCausalLM", "XverseForCausalLM", "AquilaForCausalLM", "AquilaModel"),
        ignored_tensors=IGNORED,
        ignored_keys=(
            "is_llama_config",
            "activation",
            "max_tokenizer_truncation",
        ),
    ),
)
