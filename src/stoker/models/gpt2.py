"""GPT-2: learned positions, weights stored transposed. SantaCoder and StarCoder: the same with one key/value head."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.read import GPT_SPELLINGS, activation, defaults, refuse, revise
from stoker.models.reshape import grouped_qkv, transposed


@defaults(
    also=GPT_SPELLINGS, vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, layer_norm_epsilon=1e-5,
    scale_attn_weights=True, tie_word_embeddings=True, activation_function="gelu_new",
)  # fmt: skip
def gpt2_config(hf: dict[str, Any], *, architecture: str = "GPT2LMHeadModel", kv_heads: int | None = None) -> ModelConfig:
    refuse(hf, add_cross_attention=False)
    heads, size = hf["n_head"], hf["n_embd"] // hf["n_head"]
    scale = size**-0.5 if hf["scale_attn_weights"] else 1.0
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"], bias=True)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads or heads, head_size=size, qkv_bias=True, out_bias=True, scale=scale)
    width = hf.get("n_inner") or 4 * hf["n_embd"]
    mlp = MLPConfig(size=width, activation=activation(hf, "activation_function"), gated=False, up_bias=True, down_bias=True)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["n_embd"],
        max_positions=hf["n_positions"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm),) * hf["n_layer"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
        learned_positions=hf["n_positions"],
    )
    by_layer = hf.get("scale_attn_by_inverse_layer_idx")
    return revise(config, attention=lambda i: {"scale": scale / (i + 1)}) if by_layer else config


@defaults(also=GPT_SPELLINGS, multi_query=True, activation_function="gelu_pytorch_tanh")
def bigcode_config(hf: dict[str, Any]) -> ModelConfig:
    return gpt2_config(hf, architecture="GPTBigCodeForCausalLM", kv_heads=1 if hf["multi_query"] else None)


@defaults(also=GPT_SPELLINGS, attention_head_type="multihead")
def santacoder_config(hf: dict[str, Any]) -> ModelConfig:
    refuse(hf, attention_head_type="multiquery")
    return msgspec.structs.replace(gpt2_config(hf, kv_heads=1), architecture="GPT2LMHeadCustomModel")


def bigcode_names(config: ModelConfig) -> Names:
    layer = "transformer.h.{i}"
    return {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.ln_1",
        "layers.{i}.mlp_norm": f"{layer}.ln_2",
        "layers.{i}.attention.qkv": Custom((f"{layer}.attn.c_attn",), grouped_qkv),
        "layers.{i}.attention.out": f"{layer}.attn.c_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.c_fc",
        "layers.{i}.mlp.down": f"{layer}.mlp.c_proj",
    }


def gpt2_names(config: ModelConfig) -> Names:
    layer = "transformer.h.{i}"
    return bigcode_names(config) | {
        "layers.{i}.attention.qkv": Custom((f"{layer}.attn.c_attn",), transposed),
        "layers.{i}.attention.out": Custom((f"{layer}.attn.c_proj",), transposed),
        "layers.{i}.mlp.up": Custom((f"{layer}.mlp.c_fc",), transposed),
        "layers.{i}.mlp.down": Custom((f"{layer}.mlp.c_proj",), transposed),
    }


def santacoder_names(config: ModelConfig) -> Names:
    attention = "transformer.h.{i}.attn"
    return gpt2_names(config) | {"layers.{i}.attention.qkv": Custom((f"{attention}.q_attn", f"{attention}.kv_attn"), transposed)}


_IGNORED = ("*.attn.bias", "*.attn.masked_bias")
_BARE = ((r"^(h|wte|wpe|ln_f)\.", r"transformer.\1."),)  # the first checkpoints were saved without their head
register(
    Architecture(
        "GPT2LMHeadModel",
        gpt2_config,
        gpt2_names,
        "GPT-2",
        "transformers",
        ("gpt2",),
        variant=lambda hf: "GPT2LMHeadCustomModel" if hf.get("attention_head_type") == "multiquery" else None,
        ignored=_IGNORED,
        renames=_BARE,
        versions={"gpt_model_version": lambda hf: ("gpt2",)},
    ),
    Architecture(
        "GPTBigCodeForCausalLM",
        bigcode_config,
        bigcode_names,
        "StarCoder, SantaCoder",
        "transformers",
        ("gpt_bigcode",),
        ignored=_IGNORED,
        renames=_BARE,
        versions={"gpt_model_version": lambda hf: ("starcoder", "santacoder")},
    ),
    Architecture(
        "GPT2LMHeadCustomModel",
        santacoder_config,
        santacoder_names,
        "SantaCoder as first published",
        "the weights re-laid as GPTBigCode of transformers",
        ignored=_IGNORED,
        renames=_BARE,
        versions={"gpt_model_version": lambda hf: ("santacoder",)},
    ),
)
