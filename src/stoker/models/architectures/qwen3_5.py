"""Qwen3.5: Qwen3-Next with separate input projections, in dense and MoE sizes. The vision tower of published files is left out."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_names
from stoker.models.architectures.qwen2 import qwen2_moe_names, with_experts
from stoker.models.architectures.qwen3_next import delta_net_names, gated_attention_names, with_delta_nets
from stoker.models.architectures.qwen_vl import TEXT_RENAMES, VISION_KEYS, VISION_TENSORS, text_data
from stoker.models.config_fields import read_activation, require_values, with_defaults


@with_defaults(
    vocab_size=248320, intermediate_size=12288, num_key_value_heads=4, head_dim=256, max_position_embeddings=32768,
    num_attention_heads=16, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, full_attention_interval=4,
)  # fmt: skip
def _dense_text_config(text: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of a dense Qwen3.5, from the data of its text_config."""
    require_values(text, mlp_only_layers=[])  # in the published files
    return with_delta_nets(text, "Qwen3_5ForCausalLM")


@with_defaults(
    vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
    max_position_embeddings=32768, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts_per_tok=8, num_experts=256,
)  # fmt: skip
def _moe_text_config(text: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of a Qwen3.5 with experts, from the data of its text_config."""
    config = with_delta_nets({"intermediate_size": text["moe_intermediate_size"]} | text, "Qwen3_5MoeForCausalLM")
    shared = MLPConfig(size=text["shared_expert_intermediate_size"], activation=read_activation(text))
    plain = text | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return with_experts(config, plain, num_experts=text["num_experts"], shared=shared, shared_gate=True)


def qwen3_5_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a dense Qwen3.5 checkpoint, from `hf`, the data of its config.json."""
    return _dense_text_config(text_data(hf))


def qwen3_5_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen3.5 checkpoint with experts, from `hf`, the data of its config.json."""
    return _moe_text_config(text_data(hf))


def qwen3_5_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of a dense Qwen3.5 that make each engine module, by engine name; see `TensorNames`."""
    return llama_names(config) | _mixer_names()


def qwen3_5_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Qwen3.5 with experts that make each engine module, by engine name; see `TensorNames`."""
    return qwen2_moe_names(config) | _mixer_names()


def _mixer_names() -> TensorNames:
    """The modules of gated attention and of gated delta nets, with their norms."""
    linear = "model.layers.{i}.linear_attn"
    inputs: TensorNames = {
        "layers.{i}.state.in": (f"{linear}.in_proj_qkv", f"{linear}.in_proj_z"),
        "layers.{i}.state.gates": (f"{linear}.in_proj_b", f"{linear}.in_proj_a"),
    }
    return gated_attention_names() | delta_net_names(linear) | inputs


_SOURCE_PARTS = {"layers.{i}.state.in": (3, 1)}  # in_proj_qkv has three
_TENSOR_PARALLEL = "a number of ranks that divides the value heads of the states"
_IGNORED_KEYS = (*VISION_KEYS, "linear_*", "full_attention_interval", "layer_types", "mtp_*", "mamba_ssm_dtype")
ARCHITECTURES = (
    Architecture(
        name="Qwen3_5ForCausalLM",
        read_config=qwen3_5_config,
        tensor_names=qwen3_5_names,
        source_parts=_SOURCE_PARTS,
        family="Qwen3.5 (text, dense)",
        oracle="transformers",
        tensor_parallel=_TENSOR_PARALLEL,
        model_types=("qwen3_5", "qwen3_5_text"),
        aliases=("Qwen3_5ForConditionalGeneration",),
        ignored_tensors=(*IGNORED, *VISION_TENSORS, "mtp.*"),
        tensor_renames=TEXT_RENAMES,
        ignored_keys=_IGNORED_KEYS,
    ),
    Architecture(
        name="Qwen3_5MoeForCausalLM",
        read_config=qwen3_5_moe_config,
        tensor_names=qwen3_5_moe_names,
        source_parts=_SOURCE_PARTS,
        stacks_experts=True,
        family="Qwen3.5 (text, experts)",
        oracle="transformers",
        tensor_parallel=_TENSOR_PARALLEL,
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        aliases=("Qwen3_5MoeForConditionalGeneration",),
        ignored_tensors=(*IGNORED, *VISION_TENSORS, "mtp.*"),
        tensor_renames=TEXT_RENAMES,
        ignored_keys=_IGNORED_KEYS,
    ),
)
