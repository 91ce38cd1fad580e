"""Falcon: attention and MLP in parallel over a fused qkv projection.

Falcon 7B is multi-query; 40B, 180B and 11B have grouped queries. The RefinedWeb models (RW) are sequential and use ALiBi.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import read_activation, read_max_positions, read_rope, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import group_qkv, ungroup_qkv


@with_defaults(
    aliases={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"},
    vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, layer_norm_epsilon=1e-5, alibi=False,
    new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False, activation="gelu", tie_word_embeddings=True,
)  # fmt: skip
def falcon_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Falcon checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, apply_residual_connection_post_layernorm=False)
    hidden, heads, bias = hf["hidden_size"], hf["num_attention_heads"], bool(hf["bias"])
    grouped = hf["new_decoder_architecture"] or hf.get("n_head_kv") is not None  # n_head_kv: the 40B model as first published
    size = hidden // heads
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"], bias=True)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=value_or(hf, "num_kv_heads", heads) if grouped else 1 if hf["multi_query"] else heads,
        head_size=size,
        qkv_bias=bias,
        out_bias=bias,
        rope=None if hf["alibi"] else read_rope(hf, dim=size),
        alibi=bool(hf["alibi"]),
        alibi_scale=size**-0.5 if hf["alibi"] else 1.0,
    )
    width = value_or(hf, "ffn_hidden_size", 4 * hidden)
    mlp = MLPConfig(size=width, activation=read_activation(hf, "activation"), gated=False, up_bias=bias, down_bias=bias)
    parallel = grouped or hf["parallel_attn"]
    num_norms = value_or(hf, "num_ln_in_parallel_attn", 2 if grouped else 1)
    layer = LayerConfig(
        attention=attention, mlp=mlp, norm=norm, layout="parallel" if parallel else "pre", parallel_norms=num_norms if parallel else 1
    )
    return ModelConfig(
        architecture="FalconForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=read_max_positions(hf, attention.rope),
        layers=(layer,) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
    )


def falcon_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Falcon that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    two_norms = config.layers[0].parallel_norms == 2
    return {
        "embed": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.ln_attn" if two_norms else f"{layer}.input_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.ln_mlp" if two_norms else f"{layer}.post_attention_layernorm",
        "layers.{i}.attention.qkv": Transformed((f"{layer}.self_attention.query_key_value",), ungroup_qkv, group_qkv, moves="rows"),
        "layers.{i}.attention.out": f"{layer}.self_attention.dense",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }


ARCHITECTURES = (
    Architecture(
        name="FalconForCausalLM",
        read_config=falcon_config,
        tensor_names=falcon_names,
        family="Falcon 7B, 40B, 180B, 11B, RW",
        oracle="transformers",
        model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
        aliases=("RWForCausalLM",),
        ignored_tensors=("*.rotary_emb.inv_freq",),
        ignored_keys=(
            "ff_factor",
            "multi_query",
            "num_kv_heads",
            "parallel_attn",
            "rope_*",
        ),  # each is read where another key does not replace it
    ),
)
