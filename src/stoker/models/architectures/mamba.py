"""Mamba and Falcon Mamba: blocks with a recurrent state instead of attention, and no MLPs."""

from __future__ import annotations

import math
from typing import Any

from stoker.core.model_config import LayerConfig, Mamba1Config, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.mamba2 import MAMBA_KEYS, UNLIMITED
from stoker.models.config_fields import read_activation, value_or, with_defaults
from stoker.models.tensor_transforms import squeeze_conv, unsqueeze_conv

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5, "expand": 2,
    "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": "auto", "tie_word_embeddings": True,
}  # fmt: skip


@with_defaults(**_DEFAULTS)
def mamba_config(hf: dict[str, Any], *, architecture: str = "MambaForCausalLM", block_norm: NormConfig | None = None) -> ModelConfig:
    """The ModelConfig of a Mamba checkpoint, from `hf`, the data of its config.json. `block_norm`: that of `Mamba1Config`."""
    hidden, norm, bias = hf["hidden_size"], NormConfig(eps=hf["layer_norm_epsilon"]), bool(hf["use_bias"])
    state = Mamba1Config(
        inner_size=value_or(hf, "intermediate_size", int(hf["expand"] * hidden)),
        state_size=hf["state_size"],
        step_rank=read_step_rank(hf["time_step_rank"], hidden),
        kernel=hf["conv_kernel"],
        norm=block_norm,
        activation=read_activation(hf),
        conv_bias=bool(hf["use_conv_bias"]),
        in_bias=bias,
        out_bias=bias,
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=value_or(hf, "max_position_embeddings", UNLIMITED),
        layers=(LayerConfig(state=state, norm=norm, layout="single"),) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
    )


@with_defaults(**_DEFAULTS, mixer_rms_eps=1e-6)
def falcon_mamba_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Falcon Mamba checkpoint, from `hf`, the data of its config.json.

    The inputs of the time step, B and C are normalized without weights.
    """
    norm = NormConfig(eps=hf["mixer_rms_eps"], weight=False)
    return mamba_config(hf, architecture="FalconMambaForCausalLM", block_norm=norm)


def read_step_rank(given: int | str, hidden: int) -> int:
    """The width from which time steps are projected; `auto` is a sixteenth of the hidden size, rounded up."""
    return math.ceil(hidden / 16) if given == "auto" else int(given)


def mamba_block_names(engine: str, block: str) -> TensorNames:
    """The checkpoint modules of a Mamba block. `engine` and `block` are the names of the blocks."""
    return {
        f"{engine}.in": f"{block}.in_proj",
        f"{engine}.inputs": f"{block}.x_proj",
        f"{engine}.step": f"{block}.dt_proj",
        f"{engine}.dt_bias": f"{block}.dt_proj.bias",
        f"{engine}.out": f"{block}.out_proj",
        f"{engine}.conv": Transformed((f"{block}.conv1d",), squeeze_conv, unsqueeze_conv),
        f"{engine}.a_log": f"{block}.A_log",
        f"{engine}.skip": f"{block}.D",
    }


def mamba_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Mamba that make each engine module, by engine name; see `TensorNames`."""
    return {
        "embed": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": "backbone.layers.{i}.norm",
    } | mamba_block_names("layers.{i}.state", "backbone.layers.{i}.mixer")


# Keys of the initialization and of the original implementation, whose values the other keys repeat.
_IGNORED_KEYS = (
    *MAMBA_KEYS, "time_step_scale", "d_inner", "d_model", "n_layer", "ssm_cfg*", "rms_norm", "fused_add_norm",
    "pad_vocab_size_multiple", "use_mambapy", "use_falcon_mambapy", "use_associative_scan",
)  # fmt: skip
RANKS = "a number of ranks that divides the features of the states"
ARCHITECTURES = (
    Architecture(
        name="MambaForCausalLM",
        read_config=mamba_config,
        tensor_names=mamba_names,
        family="Mamba",
        oracle="transformers",
        tensor_parallel=RANKS,
        model_types=("mamba",),
        tensor_renames=(("^backbone.embedding\\.", "backbone.embeddings."),),
        ignored_keys=_IGNORED_KEYS,
    ),
    Architecture(
        name="FalconMambaForCausalLM",
        read_config=falcon_mamba_config,
        tensor_names=mamba_names,
        family="Falcon Mamba",
        oracle="transformers",
        tensor_parallel=RANKS,
        model_types=("falcon_mamba",),
        ignored_keys=_IGNORED_KEYS,
    ),
)
