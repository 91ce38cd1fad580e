"""Falcon-H1: attention and a Mamba 2 block with the same input in every layer, and multipliers of most projections."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import BranchScales, Mamba2Config, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.mamba2 import MAMBA_KEYS, mamba2_block_names, read_step_limits
from stoker.models.config_fields import read_activation, read_head_size, replace_fields, require_values, value_or, with_defaults


@with_defaults(
    vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    rms_norm_eps=1e-5, max_position_embeddings=8192, mamba_d_ssm=1024, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1,
    mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False, mamba_norm_before_gate=True,
    mamba_rms_norm=False, projectors_bias=False, lm_head_multiplier=1.0, embedding_multiplier=1.0, key_multiplier=1.0,
    attention_out_multiplier=1.0, attention_in_multiplier=1.0, ssm_in_multiplier=1.0, ssm_out_multiplier=1.0,
)  # fmt: skip
def falcon_h1_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Falcon-H1 checkpoint, from `hf`, the data of its config.json.

    The multiplier of keys is a factor of the scale of the scores.
    """
    require_values(hf, mamba_use_mlp=True)
    config = llama_config(hf, architecture="FalconH1ForCausalLM", scale=read_head_size(hf) ** -0.5 * hf["key_multiplier"])
    bias = bool(value_or(hf, "mlp_bias", False))
    gate, down = _read_multipliers(hf, "mlp_multipliers", 2)
    mlp = MLPConfig(
        size=hf["intermediate_size"], activation=read_activation(hf), up_bias=bias, down_bias=bias, gate_scale=gate, out_scale=down
    )
    scales = BranchScales(
        attention_in=float(hf["attention_in_multiplier"]),
        attention_out=float(hf["attention_out_multiplier"]),
        state_in=float(hf["ssm_in_multiplier"]),
        state_out=float(hf["ssm_out_multiplier"]),
    )
    return replace_fields(
        config,
        layer={"state": _read_state(hf), "mlp": mlp, "branch_scales": scales},
        embed_scale=float(hf["embedding_multiplier"]),
        logit_scale=float(hf["lm_head_multiplier"]),
    )


def _read_multipliers(hf: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    """The list of multipliers under `key`, ones if it is absent. Raises CheckpointError for another number of them."""
    found = tuple(float(value) for value in value_or(hf, key, [1.0] * count))
    if len(found) != count:
        raise CheckpointError(f"config.json: {key} has {len(found)} values, and the model has {count} parts.", cure="Correct config.json.")
    return found


def _read_state(hf: dict[str, Any]) -> Mamba2Config:
    """The Mamba 2 block of all layers. Raises CheckpointError for sizes that do not match."""
    heads, groups = hf["mamba_n_heads"], hf["mamba_n_groups"]
    inner = value_or(hf, "mamba_d_ssm", int(hf["mamba_expand"] * hf["hidden_size"]))
    size = inner // heads if hf["mamba_d_head"] == "auto" else hf["mamba_d_head"]
    if heads * size != inner:
        raise CheckpointError(
            f"config.json: mamba_n_heads={heads} × mamba_d_head={size} is not mamba_d_ssm={inner}.", cure="Correct config.json."
        )
    low, high = read_step_limits(hf, "time_step_limit")
    scales = _read_multipliers(hf, "ssm_multipliers", 5)
    return Mamba2Config(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=hf["mamba_d_state"],
        kernel=hf["mamba_d_conv"],
        norm=NormConfig(eps=hf["rms_norm_eps"]) if hf["mamba_rms_norm"] else None,
        norm_groups=groups,
        gate_first=not hf["mamba_norm_before_gate"],
        activation=read_activation(hf),
        conv_bias=bool(hf["mamba_conv_bias"]),
        in_bias=bool(hf["mamba_proj_bias"]),
        out_bias=bool(hf["projectors_bias"]),
        min_step=low,
        max_step=high,
        part_scales=() if set(scales) == {1.0} else scales,
    )


def falcon_h1_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Falcon-H1 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    return (
        llama_names(config)
        | mamba2_block_names("layers.{i}.state", f"{layer}.mamba")
        | {
            "norm": "model.final_layernorm",
            "layers.{i}.mlp_norm": f"{layer}.pre_ff_layernorm",
            "layers.{i}.mlp.up": (f"{layer}.feed_forward.gate_proj", f"{layer}.feed_forward.up_proj"),
            "layers.{i}.mlp.down": f"{layer}.feed_forward.down_proj",
        }
    )


ARCHITECTURES = (
    Architecture(
        name="FalconH1ForCausalLM",
        read_config=falcon_h1_config,
        tensor_names=falcon_h1_names,
        family="Falcon-H1",
        oracle="transformers",
        tensor_parallel="a number of ranks that divides the heads of the states",
        model_types=("falcon_h1",),
        ignored_tensors=(*IGNORED, "*.mamba.mup_vector"),
        ignored_keys=(*MAMBA_KEYS, "mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"),
    ),
)
