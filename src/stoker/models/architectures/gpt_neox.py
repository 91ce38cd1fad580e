"""GPT-NeoX and Pythia: attention and MLP in parallel after two norms, rotary on a quarter of each head, qkv fused head by head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import read_activation, read_max_positions, read_rope, with_defaults
from stoker.models.tensor_transforms import group_qkv, ungroup_qkv


@with_defaults(
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576,
    layer_norm_eps=1e-5, use_parallel_residual=True, attention_bias=True,
)  # fmt: skip
def gpt_neox_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a GPT-NeoX or Pythia checkpoint, from `hf`, the data of its config.json."""
    heads, bias = hf["num_attention_heads"], bool(hf["attention_bias"])
    size = hf["hidden_size"] // heads
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"], bias=True)
    rope = read_rope(hf, dim=size, partial=0.25)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=size, qkv_bias=bias, out_bias=bias, rope=rope)
    mlp = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf, default="gelu"), gated=False, up_bias=True, down_bias=True)
    parallel = hf["use_parallel_residual"]
    layer = LayerConfig(
        attention=attention, mlp=mlp, norm=norm, layout="parallel" if parallel else "pre", parallel_norms=2 if parallel else 1
    )
    return ModelConfig(
        architecture="GPTNeoXForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=read_max_positions(hf, rope),
        layers=(layer,) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf.get("tie_word_embeddings", False)),
    )


def gpt_neox_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GPT-NeoX or Pythia that make each engine module, by engine name; see `TensorNames`."""
    layer = "gpt_neox.layers.{i}"
    return {
        "embed": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "layers.{i}.attention_norm": f"{layer}.input_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attention.qkv": Transformed((f"{layer}.attention.query_key_value",), ungroup_qkv, group_qkv, moves="rows"),
        "layers.{i}.attention.out": f"{layer}.attention.dense",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }


ARCHITECTURES = (
    Architecture(
        name="GPTNeoXForCausalLM",
        read_config=gpt_neox_config,
        tensor_names=gpt_neox_names,
        family="GPT-NeoX, Pythia",
        oracle="transformers",
        model_types=("gpt_neox",),
        ignored_tensors=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    ),
)
