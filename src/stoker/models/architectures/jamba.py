"""Jamba: Mamba blocks and attention without positions in turn, and experts instead of MLPs in some layers."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import Mamba1Config, MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.mamba import RANKS, mamba_block_names, read_step_rank
from stoker.models.architectures.mamba2 import MAMBA_KEYS
from stoker.models.config_fields import read_activation, replace_fields, require_values, with_defaults


@with_defaults(
    aliases={"num_local_experts": "num_experts"},
    vocab_size=65536, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    rms_norm_eps=1e-6, max_position_embeddings=262144, num_experts_per_tok=2, num_experts=16, expert_layer_period=2, expert_layer_offset=1,
    attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank="auto",
    mamba_conv_bias=True, mamba_proj_bias=False,
)  # fmt: skip
def jamba_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Jamba checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mlp_bias=False, mamba_inner_layernorms=True)
    config = llama_config(hf, architecture="JambaForCausalLM", rope=None)
    mlp = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf))
    experts = MoEConfig(num_experts=hf["num_experts"], top_k=hf["num_experts_per_tok"], expert=mlp, renormalize=False)
    state = _read_state(hf)
    with_attention, with_experts = _period(hf, "attn_layer"), _period(hf, "expert_layer")

    def layer(i: int) -> dict[str, Any]:
        """The fields of layer number i."""
        mixer = {} if i in with_attention else {"attention": None, "state": state}
        return mixer | ({"mlp": experts} if i in with_experts and hf["num_experts"] > 1 else {})

    return replace_fields(config, layer=layer)


def _period(hf: dict[str, Any], prefix: str) -> range:
    """The indices of every `period`-th layer. Raises CheckpointError if the first one is not within the period."""
    period, offset = hf[f"{prefix}_period"], hf[f"{prefix}_offset"]
    if not 0 <= offset < period:
        raise CheckpointError(
            f"config.json: {prefix}_offset={offset} is not from 0 to {prefix}_period={period} - 1.", cure="Correct config.json."
        )
    return range(offset, hf["num_hidden_layers"], period)


def _read_state(hf: dict[str, Any]) -> Mamba1Config:
    """The Mamba block of all layers without attention."""
    bias = bool(hf["mamba_proj_bias"])
    return Mamba1Config(
        inner_size=int(hf["mamba_expand"] * hf["hidden_size"]),
        state_size=hf["mamba_d_state"],
        step_rank=read_step_rank(hf["mamba_dt_rank"], hf["hidden_size"]),
        kernel=hf["mamba_d_conv"],
        norm=NormConfig(eps=hf["rms_norm_eps"]),
        activation=read_activation(hf),
        conv_bias=bool(hf["mamba_conv_bias"]),
        in_bias=bias,
        out_bias=bias,
    )


def jamba_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Jamba that make each engine module, by engine name; see `TensorNames`."""
    layer, block = "model.layers.{i}", "model.layers.{i}.mamba"
    mlp, expert = f"{layer}.feed_forward", f"{layer}.feed_forward.experts.{{e}}"
    return (
        llama_names(config)
        | mamba_block_names("layers.{i}.state", block)
        | {
            "norm": "model.final_layernorm",
            "layers.{i}.mlp_norm": f"{layer}.pre_ff_layernorm",
            "layers.{i}.state.step_norm": f"{block}.dt_layernorm",
            "layers.{i}.state.b_norm": f"{block}.b_layernorm",
            "layers.{i}.state.c_norm": f"{block}.c_layernorm",
            "layers.{i}.mlp.up": (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            "layers.{i}.mlp.down": f"{mlp}.down_proj",
            "layers.{i}.mlp.router": f"{mlp}.router",
            "layers.{i}.mlp.experts.up": (f"{expert}.gate_proj", f"{expert}.up_proj"),
            "layers.{i}.mlp.experts.down": f"{expert}.down_proj",
        }
    )


ARCHITECTURES = (
    Architecture(
        name="JambaForCausalLM",
        read_config=jamba_config,
        tensor_names=jamba_names,
        family="Jamba",
        oracle="transformers",
        tensor_parallel=RANKS,
        model_types=("jamba",),
        ignored_tensors=IGNORED,
        ignored_keys=(
            *MAMBA_KEYS,
            "use_mambapy",
            "use_associative_scan",
            "num_logits_to_keep",
            "calc_logits_for_entire_prompt",
        ),
    ),
)
