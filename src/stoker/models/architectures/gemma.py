"""Gemma 1, 2, and the text model of Gemma 3.

Gemma 1 is Llama with scaled embeddings and norms that multiply by 1 + w. Gemma 2 adds soft caps, norms before and after each block, and
sliding-window layers between full-attention layers. Gemma 3 replaces the caps with q/k norms, and gives sliding-window layers their own
rotary base.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import llama_config, llama_names
from stoker.models.config_fields import (
    apply_rope_scaling,
    read_rope,
    read_window_layers,
    replace_fields,
    require_values,
    value_or,
    with_defaults,
)
from stoker.models.tensor_transforms import add_one, subtract_one


@with_defaults(
    vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True,
)  # fmt: skip
def gemma_config(
    hf: dict[str, Any], *, architecture: str = "GemmaForCausalLM", activation_key: str = "hidden_act", **attention: Any
) -> ModelConfig:
    """The ModelConfig of Gemma 1. `attention` are further fields of AttentionConfig.

    `activation_key` is the key of the activation: Gemma 2 and 3 read hidden_activation, and hidden_act has no effect there.
    """
    require_values(hf, use_bidirectional_attention=False)
    activation = value_or(hf, activation_key, "gelu_pytorch_tanh")
    # Early files have gelu, but the models were trained with the tanh form.
    activation = "gelu_pytorch_tanh" if activation == "gelu" and activation_key == "hidden_act" else activation
    if activation_key == "hidden_act":
        require_values(hf, hidden_activation=activation)
    hf = hf | {"hidden_act": activation}
    norm = NormConfig(eps=hf["rms_norm_eps"], wide=True)
    config = llama_config(hf, architecture=architecture, **attention)
    return replace_fields(config, layer={"norm": norm}, norm=norm, embed_scale=hf["hidden_size"] ** 0.5)


_GEMMA2_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


@with_defaults(**_GEMMA2_DEFAULTS, final_logit_softcapping=30.0, attn_logit_softcapping=50.0, sliding_window_pattern=2)
def gemma2_config(hf: dict[str, Any], *, architecture: str = "Gemma2ForCausalLM", **attention: Any) -> ModelConfig:
    """The ModelConfig of a Gemma 2 checkpoint, from `hf`, the data of its config.json."""
    scale = hf["query_pre_attn_scalar"] ** -0.5
    softcap = hf["attn_logit_softcapping"]
    config = gemma_config(hf, architecture=architecture, activation_key="hidden_activation", scale=scale, softcap=softcap, **attention)
    local = {"window": hf["sliding_window"]}
    layer_types = read_window_layers(hf, config.num_layers)
    return replace_fields(
        config,
        layer={"layout": "sandwich"},
        attention=lambda i: local if layer_types[i] == "sliding_attention" else {},
        logit_softcap=hf["final_logit_softcapping"],
    )


@with_defaults(
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    **_GEMMA2_DEFAULTS, vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None, attn_logit_softcapping=None,
    head_dim=256, rms_norm_eps=1e-6, sliding_window_pattern=6, rope_local_base_freq=10000.0,
)  # fmt: skip
def gemma3_config(hf: dict[str, Any], *, architecture: str = "Gemma3ForCausalLM") -> ModelConfig:
    """The ModelConfig of a Gemma 3 checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(eps=hf["rms_norm_eps"], wide=True)
    global_rope = read_rope(hf, dim=hf["head_dim"], theta=1e6, kind="full_attention")
    local = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    local_theta = float(local.get("rope_theta") or hf["rope_local_base_freq"])
    local_rope = apply_rope_scaling(RopeConfig(dim=hf["head_dim"], theta=local_theta), local, hf)
    require_values(hf, attn_logit_softcapping=None)  # transformers ignores it
    config = gemma2_config(hf, architecture=architecture, qk_norm=norm, rope=global_rope)
    layer_types = read_window_layers(hf, config.num_layers)
    return replace_fields(config, attention=lambda i: {"rope": local_rope} if layer_types[i] == "sliding_attention" else {})


def gemma3_text_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model in a multimodal Gemma 3 checkpoint."""
    text = value_or(hf, "text_config", {})
    return gemma3_config({"tie_word_embeddings": hf.get("tie_word_embeddings", True)} | text, architecture="Gemma3ForConditionalGeneration")


def gemma_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Gemma 1 that make each engine module, by engine name; see `TensorNames`."""
    return _with_one_plus_norms(llama_names(config))


def gemma2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Gemma 2 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    names = llama_names(config) | {
        "layers.{i}.attention_post_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.pre_feedforward_layernorm",
        "layers.{i}.mlp_post_norm": f"{layer}.post_feedforward_layernorm",
    }
    return _with_one_plus_norms(names)


def _with_one_plus_norms(names: TensorNames) -> TensorNames:
    """`names` with every norm weight w replaced by 1 + w."""
    return {
        key: Transformed((source,), add_one, subtract_one) if key.endswith("norm") and isinstance(source, str) else source
        for key, source in names.items()
    }


# The prefixes with which transformers 4 and 5 save the language model.
LANGUAGE_MODEL_PREFIXES = (
    (r"^language_model\.model\.", "model."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.lm_head", "lm_head"),
)
ARCHITECTURES = (
    Architecture(
        name="GemmaForCausalLM",
        read_config=gemma_config,
        tensor_names=gemma_names,
        family="Gemma 1",
        oracle="transformers",
        model_types=("gemma",),
        ignored_tensors=("*.rotary_emb.inv_freq",),
    ),
    Architecture(
        name="Gemma2ForCausalLM",
        read_config=gemma2_config,
        tensor_names=gemma2_names,
        family="Gemma 2",
        oracle="transformers",
        model_types=("gemma2",),
        ignored_keys=(
            "sliding_window_size",
            "hidden_act",
        ),
    ),
    Architecture(
        name="Gemma3ForCausalLM",
        read_config=gemma3_config,
        tensor_names=gemma2_names,
        family="Gemma 3 (1B)",
        oracle="transformers",
        model_types=("gemma3_text",),
        ignored_keys=("hidden_act",),
    ),
    Architecture(
        name="Gemma3ForConditionalGeneration",
        read_config=gemma3_text_config,
        tensor_names=gemma2_names,
        family="Gemma 3 (text of 4B, 12B, 27B)",
        oracle="transformers",
        model_types=("gemma3",),
        ignored_tensors=("*vision_tower.*", "*multi_modal_projector.*"),
        tensor_renames=LANGUAGE_MODEL_PREFIXES,
        ignored_keys=(
            "image_token_id",
            "boi_token_id",
            "eoi_token_id",
            "vocab_size",
            "text_config.hidden_act",
            "vision_config*",
            "mm_tokens_per_image",
            "boi_token_index",
            "eoi_token_index",
            "image_token_index",
        ),
    ),
)
