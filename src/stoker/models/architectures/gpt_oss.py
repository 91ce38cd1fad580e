"""gpt-oss: alternating sliding-window and full attention, a learned attention sink per head, experts with biases and a clipped gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_layer_types, replace_fields, with_defaults
from stoker.models.tensor_transforms import in_features_first, in_features_last

_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}


@with_defaults(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, head_dim=64, num_hidden_layers=36, num_attention_heads=64,
    num_key_value_heads=8, sliding_window=128, max_position_embeddings=131072, rms_norm_eps=1e-5, num_local_experts=128,
    num_experts_per_tok=4, attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702, rope_parameters=_YARN,
)  # fmt: skip
def gpt_oss_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a gpt-oss checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="GptOssForCausalLM", sinks=True)
    mlp = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], up_bias=True, down_bias=True),
        score="softmax_topk",
        router_bias=True,
        glu_clip=float(hf["swiglu_limit"]),
        glu_alpha=float(hf["swiglu_alpha"]),
    )
    layer_types = read_layer_types(hf, ["full_attention" if i % 2 else "sliding_attention" for i in range(config.num_layers)])
    local = {"window": hf["sliding_window"]}
    return replace_fields(config, layer={"mlp": mlp}, attention=lambda i: local if layer_types[i] == "sliding_attention" else {})


def gpt_oss_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of gpt-oss that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    experts = f"{layer}.mlp.experts"
    return llama_names(config) | {
        "layers.{i}.attention.sinks": f"{layer}.self_attn.sinks",
        "layers.{i}.mlp.router": f"{layer}.mlp.router",
        "layers.{i}.mlp.experts.up.weight": Transformed(
            (f"{experts}.gate_up_proj",), _gates_then_ups, _gates_and_ups_in_turn, moves="expert_rows"
        ),
        "layers.{i}.mlp.experts.up.bias": Transformed((f"{experts}.gate_up_proj_bias",), _gates_then_ups, _gates_and_ups_in_turn),
        "layers.{i}.mlp.experts.down.weight": Transformed(
            (f"{experts}.down_proj",), in_features_last, in_features_first, moves="expert_rows"
        ),
        "layers.{i}.mlp.experts.down.bias": f"{experts}.down_proj_bias",
    }


def _gates_then_ups(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Weights [experts, out, in] or biases [experts, out] with all gates, then all ups.

    The checkpoint has weights [experts, in, out], and their outputs in the order gate, up, gate, up, …
    """
    rows = in_features_last(tensors, config)
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def _gates_and_ups_in_turn(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `_gates_then_ups`."""
    return in_features_first([torch.stack(tensors[0].chunk(2, dim=1), dim=2).flatten(1, 2)], config)


ARCHITECTURES = (
    Architecture(
        name="GptOssForCausalLM",
        read_config=gpt_oss_config,
        tensor_names=gpt_oss_names,
        family="gpt-oss",
        oracle="transformers",
        model_types=("gpt_oss",),
        ignored_tensors=IGNORED,
        ignored_keys=("experts_per_token", "initial_context_length"),
    ),
)
