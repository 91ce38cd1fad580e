"""Qwen 1: Llama with dynamic NTK rotary, and queries that grow with the logarithm of the position beyond the trained length."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import ModelConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import llama_config
from stoker.models.config_fields import require_values, with_defaults


@with_defaults(
    vocab_size=151936, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=22016, kv_channels=128,
    max_position_embeddings=8192, seq_length=8192, layer_norm_epsilon=1e-6, rotary_pct=1.0, rotary_emb_base=10000,
    use_dynamic_ntk=True, use_logn_attn=True, no_bias=True, scale_attn_weights=True,
)  # fmt: skip
def qwen_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 1 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, scale_attn_weights=True)
    size, trained = hf["kv_channels"], hf["seq_length"]
    rope = RopeConfig(dim=int(size * hf["rotary_pct"]), theta=float(hf["rotary_emb_base"]))
    if hf["use_dynamic_ntk"]:
        rope = msgspec.structs.replace(rope, scaling="qwen", original_max_positions=trained)
    as_llama = hf | {"intermediate_size": hf["intermediate_size"] // 2, "rms_norm_eps": hf["layer_norm_epsilon"]}
    return llama_config(
        as_llama | {"head_dim": size, "mlp_bias": not hf["no_bias"]},
        architecture="QWenLMHeadModel",
        rope=rope,
        qkv_bias=True,
        out_bias=not hf["no_bias"],
        logn_length=trained if hf["use_logn_attn"] else None,
    )


def qwen_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Qwen 1 that make each engine module, by engine name; see `TensorNames`."""
    return {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.attention.qkv": "transformer.h.{i}.attn.c_attn",
        "layers.{i}.attention.out": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.mlp.up": ("transformer.h.{i}.mlp.w2", "transformer.h.{i}.mlp.w1"),
        "layers.{i}.mlp.down": "transformer.h.{i}.mlp.c_proj",
    }


ARCHITECTURES = (
    Architecture(
        name="QWenLMHeadModel",
        read_config=qwen_config,
        tensor_names=qwen_names,
        family="Qwen 1",
        oracle="the same weights as Qwen2 of transformers; a float64 forward pass beyond the trained length",
        model_types=("qwen",),
        ignored_tensors=("transformer.rotary_emb.inv_freq", "*.attn.rotary_emb.inv_freq"),
    ),
)
