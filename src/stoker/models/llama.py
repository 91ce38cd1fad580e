"""Llama 1 to 3.x and its near-twins: Mistral (sliding window), Qwen2 (qkv bias), Qwen3 (q/k norms)."""

from __future__ import annotations

from typing import Any

from stoker.layers.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import ARCHITECTURES, Architecture, Names
from stoker.models.read import activation, head_size, rope


def llama_config(hf: dict[str, Any], *, architecture: str = "LlamaForCausalLM", **attention: Any) -> ModelConfig:
    """`attention` overrides fields of every layer's AttentionConfig."""
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    size = head_size(hf)
    settings = {
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_size": size,
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "out_bias": bool(hf.get("attention_bias", False)),
        "rope": rope(hf, dim=size),
    } | attention
    bias = bool(hf.get("mlp_bias", False))
    mlp = MLPConfig(size=hf["intermediate_size"], activation=activation(hf), up_bias=bias, down_bias=bias)
    layer = LayerConfig(attention=AttentionConfig(**settings), mlp=mlp, norm=norm)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=hf.get("max_position_embeddings", 2048),
        layers=(layer,) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf.get("tie_word_embeddings", False)),
    )


def llama_names(config: ModelConfig) -> Names:
    attention, mlp = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
    names: Names = {
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
    return names


def mistral_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_config(hf, architecture="MistralForCausalLM", window=hf.get("sliding_window"))


def qwen2_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="Qwen2ForCausalLM", qkv_bias=True, out_bias=False)
    return windowed(config, hf)


def qwen3_config(hf: dict[str, Any]) -> ModelConfig:
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6))
    return windowed(llama_config(hf, architecture="Qwen3ForCausalLM", qk_norm=norm), hf)


def windowed(config: ModelConfig, hf: dict[str, Any]) -> ModelConfig:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers on are local (or as layer_types lists them)."""
    import msgspec

    if not hf.get("use_sliding_window"):
        return config
    first = hf.get("max_window_layers", config.num_layers)
    kinds = hf.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(config.num_layers)]

    def local(layer: LayerConfig) -> LayerConfig:
        attention = msgspec.structs.replace(layer.attention, window=hf["sliding_window"])
        return msgspec.structs.replace(layer, attention=attention)

    pairs = zip(config.layers, kinds, strict=True)
    layers = tuple(local(layer) if kind == "sliding_attention" else layer for layer, kind in pairs)
    return msgspec.structs.replace(config, layers=layers)


_IGNORED = ("*.rotary_emb.inv_freq",)
for _name, _read in {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}.items():
    ARCHITECTURES.add(_name, Architecture(_name, _read, llama_names, ignored=_IGNORED))
