"""Granite 4: Granite with Mamba 2 blocks instead of attention in most layers, and usually no rotary embeddings."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import Mamba2Config, MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.granite import granite_config
from stoker.models.architectures.llama import IGNORED, llama_names
from stoker.models.architectures.mamba2 import MAMBA_KEYS, mamba2_block_names, read_step_limits
from stoker.models.config_fields import read_activation, read_layer_types, replace_fields, require_values, value_or, with_defaults
from stoker.models.config_values import COUNT, SIZE, choice


@with_defaults(
    vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_local_experts=8,
    num_experts_per_tok=2, intermediate_size=11008, shared_intermediate_size=1024, mamba_n_heads=128,
    mamba_n_groups=1, mamba_d_state=256, mamba_d_head="auto", mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
)  # fmt: skip
def granite_hybrid_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite 4 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_bias=False)
    config = granite_config(hf, architecture="GraniteMoeHybridForCausalLM")
    kind = value_or(hf, "position_embedding_type", "nope")
    state = _read_state(hf)
    shared = MLPConfig(size=hf["shared_intermediate_size"], activation=read_activation(hf))
    mlp: MLPConfig | MoEConfig = shared
    if hf["num_local_experts"]:
        expert = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf))
        mlp = MoEConfig(
            num_experts=hf["num_local_experts"], top_k=hf["num_experts_per_tok"], expert=expert, score="softmax_topk", shared=shared
        )
    key = "layers_block_type" if hf.get("layer_types") is None else "layer_types"
    kinds = read_layer_types(hf, ["mamba"] * config.num_layers, ("attention", "full_attention", "linear_attention", "mamba"), key)

    def layer(i: int) -> dict[str, Any]:
        """The fields of layer number i."""
        return {"mlp": mlp} if kinds[i] in ("attention", "full_attention") else {"mlp": mlp, "attention": None, "state": state}

    return replace_fields(config, attention={} if kind == "rope" else {"rope": None}, layer=layer)


def _read_state(hf: dict[str, Any]) -> Mamba2Config:
    """The Mamba 2 block of all layers without attention. Raises CheckpointError for sizes that do not match."""
    heads, inner, groups = hf["mamba_n_heads"], int(hf["mamba_expand"] * hf["hidden_size"]), hf["mamba_n_groups"]
    size = inner // heads if hf["mamba_d_head"] == "auto" else hf["mamba_d_head"]
    if heads * size != inner:
        raise CheckpointError(
            f"config.json: mamba_n_heads={heads} × mamba_d_head={size} is not mamba_expand × hidden_size={inner}.",
            cure="Correct config.json.",
        )
    low, high = read_step_limits(hf, "time_step_limit")
    bias = bool(hf["mamba_proj_bias"])
    return Mamba2Config(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=hf["mamba_d_state"],
        kernel=hf["mamba_d_conv"],
        norm=NormConfig(eps=hf.get("rms_norm_eps", 1e-6)),
        norm_groups=groups,
        activation=read_activation(hf),
        conv_bias=bool(hf["mamba_conv_bias"]),
        in_bias=bias,
        out_bias=bias,
        min_step=low,
        max_step=high,
    )


def granite_hybrid_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Granite 4 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    names = llama_names(config) | mamba2_block_names("layers.{i}.state", f"{layer}.mamba")
    shared, moe = f"{layer}.shared_mlp", f"{layer}.block_sparse_moe"
    if not isinstance(config.layers[0].mlp, MoEConfig):
        return names | {"layers.{i}.mlp.up": f"{shared}.input_linear", "layers.{i}.mlp.down": f"{shared}.output_linear"}
    return names | {
        "layers.{i}.mlp.router": f"{moe}.router.layer",
        "layers.{i}.mlp.experts.up": f"{moe}.input_linear",
        "layers.{i}.mlp.experts.down": f"{moe}.output_linear",
        "layers.{i}.mlp.shared.up": f"{shared}.input_linear",
        "layers.{i}.mlp.shared.down": f"{shared}.output_linear",
    }


ARCHITECTURES = (
    Architecture(
        name="GraniteMoeHybridForCausalLM",
        read_config=granite_hybrid_config,
        tensor_names=granite_hybrid_names,
        family="Granite 4",
        oracle="transformers",
        tensor_parallel="a number of ranks that divides the heads of the states",
        model_types=("granitemoehybrid",),
        ignored_tensors=IGNORED,
        kinds={
            "num_local_experts": COUNT,  # 0: a dense model
            "shared_intermediate_size": SIZE,
            "position_embedding_type": choice("rope", "nope"),
        },
        ignored_keys=(*MAMBA_KEYS, "mamba_chunk_size", "rope_*", "normalization_function", "num_experts_per_tok"),
    ),
)
