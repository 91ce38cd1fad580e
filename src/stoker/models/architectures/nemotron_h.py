"""Nemotron-H and Nemotron 3 Nano: a sequence of blocks, each a Mamba 2 block, attention without positions, an MLP, or experts.

An engine layer is a block with a state or attention, and the MLP or the experts that follow it, if any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import AttentionConfig, LayerConfig, Mamba2Config, MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.deepseek import corrected_routing
from stoker.models.architectures.mamba2 import MAMBA_KEYS, mamba2_block_names
from stoker.models.config_fields import check_layer_kinds, read_activation, require_values, value_or, with_defaults
from stoker.models.config_values import COUNT

_BY_LETTER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_BY_NAME = {name: name for name in _BY_LETTER.values()} | {"linear_attention": "mamba", "full_attention": "attention"}


@with_defaults(
    aliases={"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min", "attention_head_dim": "head_dim"},
    vocab_size=131072, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    intermediate_size=21504, mlp_hidden_act="relu2", mlp_bias=False, ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64,
    mamba_hidden_act="silu", n_groups=8, conv_kernel=4, time_step_min=0.001, use_conv_bias=True, n_routed_experts=8,
    moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, num_experts_per_tok=2, routed_scaling_factor=1.0, n_group=1,
    topk_group=1, norm_topk_prob=True, use_bias=False, layer_norm_epsilon=1e-5,
)  # fmt: skip
def nemotron_h_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Nemotron-H checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mamba_proj_bias=False, tie_word_embeddings=False, sliding_window=0, moe_latent_size=None)
    norm = NormConfig(eps=hf["layer_norm_epsilon"])
    mixers: dict[str, dict[str, Any]] = {"mamba": {"state": _read_state(hf, norm)}, "attention": {"attention": _read_attention(hf)}}
    mlps: dict[str, MLPConfig | MoEConfig] = {"mlp": _mlp(hf, hf["intermediate_size"]), "moe": _read_experts(hf)}
    kinds = _read_kinds(hf)
    layers, i = [], 0
    while i < len(kinds):
        if kinds[i] not in mixers:
            raise CheckpointError(
                f"config.json: block number {i} is {kinds[i]}, which is not supported after {kinds[i - 1] if i else 'the embeddings'}.",
                cure="An MLP or experts must follow a Mamba or an attention block.",
            )
        mlp = mlps.get(kinds[i + 1]) if i + 1 < len(kinds) else None
        layers.append(LayerConfig(**mixers[kinds[i]], mlp=mlp, norm=norm, layout="single" if mlp is None else "pre"))
        i += 1 if mlp is None else 2
    return ModelConfig(
        architecture="NemotronHForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=hf["max_position_embeddings"],
        layers=tuple(layers),
        norm=norm,
    )


def _read_kinds(hf: dict[str, Any]) -> list[str]:
    """The kind of each block: mamba, attention, mlp or moe. Raises CheckpointError for another kind."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if hf.get(key) is not None), keys[0])
    table = _BY_NAME | _BY_LETTER
    found = list(value_or(hf, key, ["mamba", "moe", "attention", "mlp"]))
    check_layer_kinds(key, found, table)
    return [table[kind] for kind in found]


def _read_state(hf: dict[str, Any], norm: NormConfig) -> Mamba2Config:
    """The Mamba 2 block of all Mamba layers. The time step is at least time_step_min, as in transformers."""
    bias = bool(hf["use_bias"])
    return Mamba2Config(
        num_heads=hf["mamba_num_heads"],
        head_size=hf["mamba_head_dim"],
        num_groups=hf["n_groups"],
        state_size=hf["ssm_state_size"],
        kernel=hf["conv_kernel"],
        norm=norm,
        norm_groups=hf["n_groups"],
        activation=read_activation(hf, "mamba_hidden_act"),
        conv_bias=bool(hf["use_conv_bias"]),
        in_bias=bias,
        out_bias=bias,
        min_step=float(hf["time_step_min"]),
    )


def _read_attention(hf: dict[str, Any]) -> AttentionConfig:
    """The attention of all attention layers, which has no position embedding."""
    heads = hf["num_attention_heads"]
    return AttentionConfig(num_heads=heads, num_kv_heads=value_or(hf, "num_key_value_heads", heads), head_size=hf["head_dim"])


def _mlp(hf: dict[str, Any], size: int) -> MLPConfig:
    """An MLP without a gate."""
    bias = bool(hf["mlp_bias"])
    return MLPConfig(size=size, activation=read_activation(hf, "mlp_hidden_act"), gated=False, up_bias=bias, down_bias=bias)


def _read_experts(hf: dict[str, Any]) -> MoEConfig:
    """The experts of all MoE layers, and their shared expert."""
    expert = MLPConfig(size=hf["moe_intermediate_size"], activation=read_activation(hf, "mlp_hidden_act"), gated=False)
    return MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=expert,
        **corrected_routing(hf),
        shared=_mlp(hf, hf["moe_shared_expert_intermediate_size"]),
    )


def nemotron_h_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Nemotron-H that make each engine module, by engine name; see `TensorNames`."""
    names: TensorNames = {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}
    for i, first in first_blocks(config):
        layer, mixer, mlp = f"layers.{i}", f"backbone.layers.{first}.mixer", f"backbone.layers.{first + 1}.mixer"
        names |= mamba2_block_names(f"{layer}.state", mixer) | {
            f"{layer}.attention_norm": f"backbone.layers.{first}.norm",
            f"{layer}.mlp_norm": f"backbone.layers.{first + 1}.norm",
            f"{layer}.attention.qkv": (f"{mixer}.q_proj", f"{mixer}.k_proj", f"{mixer}.v_proj"),
            f"{layer}.attention.out": f"{mixer}.o_proj",
            f"{layer}.mlp.up": f"{mlp}.up_proj",
            f"{layer}.mlp.down": f"{mlp}.down_proj",
            f"{layer}.mlp.router": f"{mlp}.gate",
            f"{layer}.mlp.correction": f"{mlp}.gate.e_score_correction_bias",
            f"{layer}.mlp.experts.up": f"{mlp}.experts.{{e}}.up_proj",
            f"{layer}.mlp.experts.down": f"{mlp}.experts.{{e}}.down_proj",
            f"{layer}.mlp.shared.up": f"{mlp}.shared_experts.up_proj",
            f"{layer}.mlp.shared.down": f"{mlp}.shared_experts.down_proj",
        }
    return names


def first_blocks(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """(layer index, index of its first block in the checkpoint) of each layer."""
    block = 0
    for i, layer in enumerate(config.layers):
        yield i, block
        block += 1 if layer.mlp is None else 2


ARCHITECTURES = (
    Architecture(
        name="NemotronHForCausalLM",
        read_config=nemotron_h_config,
        tensor_names=nemotron_h_names,
        family="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
        oracle="transformers",
        tensor_parallel="a number of ranks that divides the heads of the states",
        model_types=("nemotron_h",),
        tensor_renames=((r"^model\.", "backbone."),),
        ignored_tensors=("mtp.*",),
        kinds={"sliding_window": COUNT},
        ignored_keys=(
            *MAMBA_KEYS,
            "time_step_limit",
            "num_hidden_layers",
            "hybrid_override_pattern",
            "layers_block_type",
            "layer_types",
            "rms_norm_eps",  # layer_norm_epsilon is read
            "norm_eps",
            "rope_theta",  # of published files; attention has no positions
            "partial_rotary_factor",
            "expand",
            "mamba_*",
            "mtp_*",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "n_shared_experts",
            "moe_shared_expert_overlap",
        ),
    ),
)
