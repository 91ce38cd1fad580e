"""GPT-J: attention and MLP in parallel after one norm, interleaved rotary on the first `rotary_dim` features of each head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.config_fields import GPT_KEY_ALIASES, read_activation, require_values, value_or, with_defaults


@with_defaults(
    aliases=GPT_KEY_ALIASES,
    vocab_size=50400, n_positions=2048, n_embd=4096, n_layer=28, n_head=16, rotary_dim=64, activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
)  # fmt: skip
def gptj_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a GPT-J checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, rotary=True, scale_attn_weights=True)
    heads, size = hf["n_head"], hf["n_embd"] // hf["n_head"]
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"], bias=True)
    rope = RopeConfig(dim=hf["rotary_dim"] or size, interleaved=True)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=size, rope=rope)
    width = value_or(hf, "n_inner", 4 * hf["n_embd"])
    mlp = MLPConfig(size=width, activation=read_activation(hf, "activation_function"), gated=False, up_bias=True, down_bias=True)
    return ModelConfig(
        architecture="GPTJForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["n_embd"],
        max_positions=hf["n_positions"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm, layout="parallel"),) * hf["n_layer"],
        norm=norm,
        tie_head=bool(hf.get("tie_word_embeddings", False)),
        head_bias=True,
    )


def gptj_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GPT-J that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    return {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.ln_1",
        "layers.{i}.attention.qkv": (f"{layer}.attn.q_proj", f"{layer}.attn.k_proj", f"{layer}.attn.v_proj"),
        "layers.{i}.attention.out": f"{layer}.attn.out_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.fc_in",
        "layers.{i}.mlp.down": f"{layer}.mlp.fc_out",
    }


ARCHITECTURES = (
    Architecture(
        name="GPTJForCausalLM",
        read_config=gptj_config,
        tensor_names=gptj_names,
        family="GPT-J",
        oracle="transformers",
        model_types=("gptj",),
        ignored_tensors=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions"),
    ),
)
