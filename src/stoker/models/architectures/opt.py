"""OPT: learned positions that start at row 2 of their table, and ReLU.

OPT-350m normalizes after each block, and its embeddings are narrower than the hidden size.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.config_fields import read_activation, value_or, with_defaults

OFFSET = 2  # the first two rows of the position table were used for padding


@with_defaults(
    vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, max_position_embeddings=2048, do_layer_norm_before=True,
    num_attention_heads=12, activation_function="relu", enable_bias=True, layer_norm_elementwise_affine=True, tie_word_embeddings=True,
)  # fmt: skip
def opt_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a OPT checkpoint, from `hf`, the data of its config.json."""
    hidden, heads, bias, norm_first = hf["hidden_size"], hf["num_attention_heads"], bool(hf["enable_bias"]), hf["do_layer_norm_before"]
    affine, no_last_norm = bool(hf["layer_norm_elementwise_affine"]), bool(hf.get("_remove_final_layer_norm"))
    norm = NormConfig(kind="layer", eps=1e-5, weight=affine, bias=affine)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=hidden // heads, qkv_bias=bias, out_bias=bias)
    mlp = MLPConfig(size=hf["ffn_dim"], activation=read_activation(hf, "activation_function"), gated=False, up_bias=bias, down_bias=bias)
    embed_size = value_or(hf, "word_embed_proj_dim", hidden)
    return ModelConfig(
        architecture="OPTForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=hf["max_position_embeddings"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm, layout="pre" if norm_first else "last"),) * hf["num_hidden_layers"],
        norm=norm if norm_first and not no_last_norm else None,
        tie_head=bool(hf["tie_word_embeddings"]),
        learned_positions=hf["max_position_embeddings"] + OFFSET,
        position_offset=OFFSET,
        embed_size=embed_size if embed_size != hidden else None,
    )


def opt_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of OPT that make each engine module, by engine name; see `TensorNames`."""
    decoder, layer = "model.decoder", "model.decoder.layers.{i}"
    return {
        "embed": f"{decoder}.embed_tokens",
        "positions": f"{decoder}.embed_positions",
        "project_in": f"{decoder}.project_in",
        "project_out": f"{decoder}.project_out",
        "norm": f"{decoder}.final_layer_norm",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.self_attn_layer_norm",
        "layers.{i}.mlp_norm": f"{layer}.final_layer_norm",
        "layers.{i}.attention.qkv": (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.k_proj", f"{layer}.self_attn.v_proj"),
        "layers.{i}.attention.out": f"{layer}.self_attn.out_proj",
        "layers.{i}.mlp.up": f"{layer}.fc1",
        "layers.{i}.mlp.down": f"{layer}.fc2",
    }


ARCHITECTURES = (
    Architecture(
        name="OPTForCausalLM",
        read_config=opt_config,
        tensor_names=opt_names,
        family="OPT",
        oracle="transformers",
        model_types=("opt",),
        tensor_renames=((r"^decoder\.", "model.decoder."),),
    ),
)
