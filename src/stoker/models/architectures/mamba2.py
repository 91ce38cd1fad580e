"""Mamba 2: blocks with a recurrent state instead of attention, and no MLPs."""

from __future__ import annotations

import math
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import LayerConfig, Mamba2Config, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import read_activation, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import squeeze_conv, unsqueeze_conv

UNLIMITED = 1 << 20  # positions of a model whose config.json has no limit


@with_defaults(
    num_heads=128, head_dim=64, vocab_size=32768, hidden_size=4096, state_size=128, num_hidden_layers=64, layer_norm_epsilon=1e-5,
    expand=2, conv_kernel=4, n_groups=8, use_bias=False, use_conv_bias=True, tie_word_embeddings=False,
)  # fmt: skip
def mamba2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mamba 2 checkpoint, from `hf`, the data of its config.json."""
    hidden, heads, size, groups = hf["hidden_size"], hf["num_heads"], hf["head_dim"], hf["n_groups"]
    if int(hf["expand"] * hidden) != heads * size:
        raise CheckpointError(
            f"config.json: num_heads={heads} × head_dim={size} is not expand={hf['expand']} × hidden_size={hidden}.",
            cure="Correct config.json.",
        )
    require_values(hf, norm_before_gate=False, rms_norm=True)
    norm = NormConfig(eps=hf["layer_norm_epsilon"])
    low, high = read_step_limits(hf, "time_step_limit")
    state = Mamba2Config(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=hf["state_size"],
        kernel=hf["conv_kernel"],
        norm=norm,
        norm_groups=groups,
        activation=read_activation(hf),
        conv_bias=bool(hf["use_conv_bias"]),
        in_bias=bool(hf["use_bias"]),
        out_bias=bool(hf["use_bias"]),
        min_step=low,
        max_step=high,
    )
    return ModelConfig(
        architecture="Mamba2ForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        max_positions=value_or(hf, "max_position_embeddings", UNLIMITED),
        layers=(LayerConfig(state=state, norm=norm, layout="single"),) * hf["num_hidden_layers"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
    )


def read_step_limits(hf: dict[str, Any], key: str) -> tuple[float, float | None]:
    """The bounds of the time step under `key`, from 0 to no bound if it is absent.

    transformers writes an infinite bound as {"__float__": "Infinity"}.
    """
    limits = value_or(hf, key, (0.0, math.inf))
    low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    return low, high if math.isfinite(high) else None


def mamba2_block_names(engine: str, block: str) -> TensorNames:
    """The checkpoint modules of a Mamba 2 block, as many families name them. `engine` and `block` are the names of the blocks."""
    conv = f"{block}.conv1d"
    return {
        f"{engine}.in": f"{block}.in_proj",
        f"{engine}.out": f"{block}.out_proj",
        f"{engine}.conv": Transformed((conv,), squeeze_conv, unsqueeze_conv),
        f"{engine}.a_log": f"{block}.A_log",
        f"{engine}.dt_bias": f"{block}.dt_bias",
        f"{engine}.skip": f"{block}.D",
        f"{engine}.norm": f"{block}.norm",
    }


def mamba2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Mamba 2 that make each engine module, by engine name; see `TensorNames`."""
    return {
        "embed": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": "backbone.layers.{i}.norm",
    } | mamba2_block_names("layers.{i}.state", "backbone.layers.{i}.mixer")


# Keys of the initialization and of kernels, which do not change the function of a trained model.
MAMBA_KEYS = (
    "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "chunk_size", "residual_in_fp32",
    "rescale_prenorm_residual", "use_mamba_kernels", "use_triton*",
)  # fmt: skip
ARCHITECTURES = (
    Architecture(
        name="Mamba2ForCausalLM",
        read_config=mamba2_config,
        tensor_names=mamba2_names,
        family="Mamba 2, Mamba-Codestral",
        oracle="transformers",
        tensor_parallel="a number of ranks that divides the heads of the states",
        model_types=("mamba2",),
        tensor_renames=(("^backbone.embedding\\.", "backbone.embeddings."),),
        ignored_keys=MAMBA_KEYS,
    ),
)
