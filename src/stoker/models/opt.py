"""OPT: learned positions from row 2 on, ReLU; the 350m norms last and has embeddings narrower than its stream."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.read import activation, defaults

OFFSET = 2  # the table's first rows were padding's


@defaults(
    vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, max_position_embeddings=2048, do_layer_norm_before=True,
    num_attention_heads=12, activation_function="relu", enable_bias=True, layer_norm_elementwise_affine=True, tie_word_embeddings=True,
)  # fmt: skip
def opt_config(hf: dict[str, Any]) -> ModelConfig:
    hidden, heads, bias, before = hf["hidden_size"], hf["num_attention_heads"], bool(hf["enable_bias"]), hf["do_layer_norm_before"]
    affine = bool(hf["layer_norm_elementwise_affine"])
    norm = NormConfig(kind="layer", eps=1e-5, weight=affine, bias=affine)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=hidden // heads, qkv_bias=bias, out_bias=bias)
    mlp = MLPConfig(size=hf["ffn_dim"], activation=activation(hf, "activation_function"), gated=False, up_bias=bias, down_bias=bias)
    narrow = hf.get("word_embed_proj_dim") or hidden
    return ModelConfig(
        architecture="OPTForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=hf["max_position_embeddings"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm, layout="pre" if before else "last"),) * hf["num_hidden_layers"],
        norm=norm if before and not hf.get("_remove_final_layer_norm") else None,
        tie_head=bool(hf["tie_word_embeddings"]),
        learned_positions=hf["max_position_embeddings"] + OFFSET,
        position_offset=OFFSET,
        embed_size=narrow if narrow != hidden else None,
    )


def opt_names(config: ModelConfig) -> Names:
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


register(
    Architecture("OPTForCausalLM", opt_config, opt_names, "OPT", "transformers", ("opt",), renames=((r"^decoder\.", "model.decoder."),))
)
