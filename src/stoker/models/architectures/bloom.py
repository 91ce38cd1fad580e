"""BLOOM: ALiBi, a norm after the embeddings, and q, k and v fused head by head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import require_values, with_defaults
from stoker.models.tensor_transforms import group_qkv, ungroup_qkv


@with_defaults(
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    vocab_size=250880, hidden_size=64, n_layer=2, n_head=8, layer_norm_epsilon=1e-5, seq_length=2048, tie_word_embeddings=True,
)  # fmt: skip
def bloom_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a BLOOM checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, slow_but_exact=False)
    hidden, heads = hf["hidden_size"], hf["n_head"]
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"], bias=True)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=hidden // heads, qkv_bias=True, out_bias=True, alibi=True)
    mlp = MLPConfig(size=4 * hidden, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True)
    layout = "add_norm" if hf.get("apply_residual_connection_post_layernorm") else "pre"
    return ModelConfig(
        architecture="BloomForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=hf["seq_length"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm, layout=layout),) * hf["n_layer"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
        embed_norm=norm,
    )


def bloom_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of BLOOM that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    return {
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.input_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attention.qkv": Transformed((f"{layer}.self_attention.query_key_value",), ungroup_qkv, group_qkv, moves="rows"),
        "layers.{i}.attention.out": f"{layer}.self_attention.dense",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }


_WITHOUT_PREFIX = ((r"^(h|word_embeddings|word_embeddings_layernorm|ln_f)\.", r"transformer.\1."),)
ARCHITECTURES = (
    Architecture(
        name="BloomForCausalLM",
        read_config=bloom_config,
        tensor_names=bloom_names,
        family="BLOOM, BLOOMZ",
        oracle="transformers",
        model_types=("bloom",),
        tensor_renames=_WITHOUT_PREFIX,
        ignored_keys=("offset_alibi",),
    ),
)
