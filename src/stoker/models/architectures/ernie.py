"""ERNIE 4.5: Llama with interleaved rotary embeddings, and one setting for all biases. The MoE models have shared experts."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.deepseek import deepseek_names
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, read_head_size, read_rope, replace_fields, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import flatten, unflatten_row


@with_defaults(
    vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, use_bias=False, tie_word_embeddings=True,
)  # fmt: skip
def ernie_config(hf: dict[str, Any], *, architecture: str = "Ernie4_5ForCausalLM") -> ModelConfig:
    """The ModelConfig of an ERNIE 4.5 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=hf["use_bias"], mlp_bias=hf["use_bias"])
    biases = {"attention_bias": hf["use_bias"], "mlp_bias": hf["use_bias"]}
    rope = read_rope(hf, dim=read_head_size(hf), interleaved=True, theta=500000.0)
    return llama_config(hf | biases, architecture=architecture, rope=rope)


@with_defaults(
    hidden_size=2560, intermediate_size=12288, num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4, head_dim=None,
    moe_intermediate_size=1536, moe_k=6, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
    moe_layer_interval=1, use_bias=False,
)  # fmt: skip
def ernie_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an ERNIE 4.5 MoE checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, moe_norm_min=1e-12, moe_gate="topk", moe_use_aux_free=True, use_rmsnorm=True, use_bias=False)
    config = ernie_config(hf, architecture="Ernie4_5_MoeForCausalLM")
    size, shared, activation = hf["moe_intermediate_size"], hf["moe_num_shared_experts"], read_activation(hf)
    moe = MoEConfig(
        num_experts=hf["moe_num_experts"],
        top_k=hf["moe_k"],
        expert=MLPConfig(size=size, activation=activation),
        shared=MLPConfig(size=size * shared, activation=activation) if shared else None,
        correction_bias=True,
    )
    first, last, step = hf["moe_layer_start_index"], value_or(hf, "moe_layer_end_index", -1), hf["moe_layer_interval"]
    last = config.num_layers - 1 if last == -1 else last
    return replace_fields(config, layer=lambda i: {"mlp": moe} if first <= i <= last and (i + 1) % step == 0 else {})


def ernie_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of ERNIE 4.5 MoE that make each engine module, by engine name; see `TensorNames`."""
    correction = "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"  # [1, experts]
    return deepseek_names(config) | {"layers.{i}.mlp.correction": Transformed((correction,), flatten, unflatten_row)}


ARCHITECTURES = (
    Architecture(
        name="Ernie4_5ForCausalLM",
        read_config=ernie_config,
        tensor_names=llama_names,
        family="ERNIE 4.5 (dense)",
        oracle="transformers",
        model_types=("ernie4_5",),
        aliases=("Ernie4_5_ForCausalLM",),
        ignored_tensors=IGNORED,
        ignored_keys=("compression_ratio",),
    ),
    Architecture(
        name="Ernie4_5_MoeForCausalLM",
        read_config=ernie_moe_config,
        tensor_names=ernie_moe_names,
        family="ERNIE 4.5 MoE (text)",
        oracle="transformers",
        model_types=("ernie4_5_moe",),
        ignored_tensors=(*IGNORED, "model.mtp_*"),  # the multi-token prediction layer
        ignored_keys=("moe_capacity", "num_nextn_predict_layers"),
    ),
)
