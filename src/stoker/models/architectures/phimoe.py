"""Phi-3.5-MoE: Mixtral with layer norms, biases, and experts that SparseMixer chooses one after the other."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config
from stoker.models.architectures.mistral import mixtral_names
from stoker.models.config_fields import (
    read_activation,
    read_head_size,
    read_rope,
    replace_fields,
    require_values,
    value_or,
    with_defaults,
)


@with_defaults(
    vocab_size=32064, hidden_size=4096, intermediate_size=6400, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=131072, rms_norm_eps=1e-5, num_local_experts=16, num_experts_per_tok=2, router_jitter_noise=0.01,
)  # fmt: skip
def phimoe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Phi-3.5-MoE checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_bias=False, num_experts_per_tok=2)
    norm = NormConfig(kind="layer", eps=hf["rms_norm_eps"], bias=True)
    config = llama_config(hf, architecture="PhimoeForCausalLM", window=hf.get("sliding_window"), rope=_read_rope(hf))
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf)),
        score="sparsemixer",
        jitter=float(hf["router_jitter_noise"]),
        renormalize=False,
    )
    return replace_fields(config, layer={"norm": norm, "mlp": moe}, norm=norm, head_bias=bool(hf.get("lm_head_bias", False)))


def _read_rope(hf: dict[str, Any]) -> RopeConfig:
    """The rotary settings. short_mscale and long_mscale multiply cosines and sines within and beyond the original context."""
    rope = read_rope(hf, dim=read_head_size(hf), theta=1e6)
    if rope.scaling == "default":
        return rope
    require_values({"rope_scaling.type": rope.scaling}, **{"rope_scaling.type": "longrope"})
    scaling = value_or(hf, "rope_scaling", value_or(hf, "rope_parameters", {}))
    return msgspec.structs.replace(rope, short_mscale=float(scaling["short_mscale"]), long_mscale=float(scaling["long_mscale"]))


ARCHITECTURES = (
    Architecture(
        name="PhimoeForCausalLM",
        read_config=phimoe_config,
        tensor_names=mixtral_names,
        family="Phi-3.5-MoE",
        oracle="transformers",
        model_types=("phimoe",),
        aliases=("PhiMoEForCausalLM",),
        ignored_tensors=IGNORED,
        ignored_keys=("input_jitter_noise", "original_max_position_embeddings"),  # noise of training; read for longrope only
    ),
)
