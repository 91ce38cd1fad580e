"""MPT: ALiBi, no biases, and optionally clipped q, k and v."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.config_fields import require_values, value_or, with_defaults


@with_defaults(
    aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    vocab_size=50368, d_model=2048, n_heads=16, n_layers=24, expansion_ratio=4, max_seq_len=2048, layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip
def mpt_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a MPT checkpoint, from `hf`, the data of its config.json."""
    inner = value_or(hf, "attn_config", {})
    require_values(hf, no_bias=True, embedding_fraction=1.0, logit_scale=None)
    require_values(
        inner,
        alibi=True,
        rope=False,
        prefix_lm=False,
        attn_uses_sequence_id=False,
        qk_ln=False,
        qk_gn=False,
        attn_type="multihead_attention",
    )
    if "layernorm" not in (hf.get("norm_type") or "layernorm"):
        require_values(hf, norm_type="low_precision_layernorm")
    hidden, heads = hf["d_model"], hf["n_heads"]
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"])
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        scale=inner.get("softmax_scale"),
        clip_qkv=inner.get("clip_qkv") or None,
        alibi=True,
        alibi_max=float(inner.get("alibi_bias_max", 8)),
    )
    mlp = MLPConfig(size=hf["expansion_ratio"] * hidden, activation="gelu", gated=False)
    return ModelConfig(
        architecture="MptForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=hf["max_seq_len"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm),) * hf["n_layers"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
    )


def mpt_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of MPT that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.blocks.{i}"
    return {
        "embed": "transformer.wte",
        "norm": "transformer.norm_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.norm_1",
        "layers.{i}.mlp_norm": f"{layer}.norm_2",
        "layers.{i}.attention.qkv": f"{layer}.attn.Wqkv",
        "layers.{i}.attention.out": f"{layer}.attn.out_proj",
        "layers.{i}.mlp.up": f"{layer}.ffn.up_proj",
        "layers.{i}.mlp.down": f"{layer}.ffn.down_proj",
    }


ARCHITECTURES = (
    Architecture(
        name="MptForCausalLM",
        read_config=mpt_config,
        tensor_names=mpt_names,
        family="MPT",
        oracle="transformers",
        model_types=("mpt",),
        aliases=("MPTForCausalLM",),
        ignored_keys=("attn_config.attn_impl", "attn_config.is_encoder_decoder", "learned_pos_emb"),
    ),
)
