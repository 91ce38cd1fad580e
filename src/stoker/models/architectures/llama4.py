"""Llama 4 (text): rotary layers that attend within chunks, layers without rotary embedding, and experts whose input is weighted."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig, NormConfig, QueryScaleConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.gemma import LANGUAGE_MODEL_PREFIXES
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import (
    read_activation,
    read_layer_types,
    read_per_layer,
    read_rope,
    replace_fields,
    value_or,
    with_defaults,
)
from stoker.models.tensor_transforms import in_features_first, in_features_last


@with_defaults(
    vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384, num_hidden_layers=48, num_attention_heads=40,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, num_experts_per_tok=1, num_local_experts=16,
    interleave_moe_layer_step=1, use_qk_norm=True, no_rope_layer_interval=4, attn_temperature_tuning=True, floor_scale=8192,
    attn_scale=0.1, attention_chunk_size=8192,
)  # fmt: skip
def llama4_text_config(hf: dict[str, Any], *, architecture: str = "Llama4ForCausalLM") -> ModelConfig:
    """The ModelConfig of the language model of Llama 4, from the data of its config.json."""
    rope = read_rope(hf, dim=hf["head_dim"], theta=500000.0, interleaved=True)
    config = llama_config(hf, architecture=architecture, rope=rope)
    layers = range(config.num_layers)
    default = [(i + 1) % hf["no_rope_layer_interval"] != 0 for i in layers]
    rotary = read_per_layer(hf, "no_rope_layers", len(layers), default) if hf.get("no_rope_layers") else default
    kinds = read_layer_types(
        hf, ["chunked_attention" if rotary[i] else "full_attention" for i in layers], ("chunked_attention", "full_attention")
    )
    step = hf["interleave_moe_layer_step"]
    with_experts = value_or(hf, "moe_layers", list(range(step - 1, config.num_layers, step)))
    # The norm has no weights, so it may precede a rotation, which keeps the length of a head unless the method scales cosines and sines.
    norm = NormConfig(eps=hf["rms_norm_eps"], weight=False) if hf["use_qk_norm"] else None
    scaled = rope.scaling in ("yarn", "longrope")
    tuned = QueryScaleConfig(interval=hf["floor_scale"], beta=hf["attn_scale"], offset=1) if hf["attn_temperature_tuning"] else None

    def attention(i: int) -> dict[str, Any]:
        """The fields of layer number i that differ from those of Llama."""
        chunk = {"chunk": hf["attention_chunk_size"]} if kinds[i] == "chunked_attention" else {}
        if rotary[i]:
            return chunk | {"qk_norm": norm, "qk_norm_after_rope": norm is not None and scaled}
        return chunk | {"rope": None, "query_scale": tuned}

    activation = read_activation(hf)
    expert = MLPConfig(size=hf["intermediate_size"], activation=activation)
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=expert,
        score="sigmoid",
        renormalize=False,
        scale_input=True,
        shared=expert,
    )
    dense = MLPConfig(size=hf["intermediate_size_mlp"], activation=activation)
    return replace_fields(config, attention=attention, layer=lambda i: {"mlp": moe if i in with_experts else dense})


def llama4_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model in a multimodal Llama 4 checkpoint."""
    text = value_or(hf, "text_config", {})
    tied = bool(hf.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    return llama4_text_config(text | {"tie_word_embeddings": tied}, architecture="Llama4ForConditionalGeneration")


def llama4_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Llama 4 that make each engine module, by engine name; see `TensorNames`."""
    mlp = "model.layers.{i}.feed_forward"
    return llama_names(config) | {
        "layers.{i}.mlp.up": (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "layers.{i}.mlp.down": f"{mlp}.down_proj",
        "layers.{i}.mlp.router": f"{mlp}.router",
        "layers.{i}.mlp.experts.up.weight": Transformed((f"{mlp}.experts.gate_up_proj",), in_features_last, in_features_first),
        "layers.{i}.mlp.experts.down.weight": Transformed((f"{mlp}.experts.down_proj",), in_features_last, in_features_first),
        "layers.{i}.mlp.shared.up": (f"{mlp}.shared_expert.gate_proj", f"{mlp}.shared_expert.up_proj"),
        "layers.{i}.mlp.shared.down": f"{mlp}.shared_expert.down_proj",
    }


# Each is read where another key does not replace it, or not at all by the reference implementation.
_IGNORED_KEYS = ("no_rope_layer_interval", "interleave_moe_layer_step", "attention_chunk_size", "floor_scale", "attn_scale")
ARCHITECTURES = (
    Architecture(
        name="Llama4ForCausalLM",
        read_config=llama4_text_config,
        tensor_names=llama4_names,
        family="Llama 4 (text model alone)",
        oracle="transformers",
        model_types=("llama4_text",),
        ignored_tensors=IGNORED,
        ignored_keys=(*_IGNORED_KEYS, "for_llm_compressor"),
        plain_export=True,
    ),
    Architecture(
        name="Llama4ForConditionalGeneration",
        read_config=llama4_config,
        tensor_names=llama4_names,
        family="Llama 4 Scout, Maverick (text)",
        oracle="transformers",
        model_types=("llama4",),
        ignored_tensors=(*IGNORED, "*vision_model.*", "*multi_modal_projector.*"),
        tensor_renames=LANGUAGE_MODEL_PREFIXES,
        ignored_keys=(
            *_IGNORED_KEYS, "for_llm_compressor", "vision_config*", "boi_token_index", "eoi_token_index", "image_token_index",
        ),
    ),
)  # fmt: skip
