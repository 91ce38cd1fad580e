"""StarCoder 2: Llama's attention with biases, layer norms and an MLP without a gate."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, replace_fields, require_values, with_defaults


@with_defaults(
    vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
    num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-5, use_bias=True,
    tie_word_embeddings=True,
)  # fmt: skip
def starcoder2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a StarCoder 2 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_type="default", norm_type="layer_norm")
    bias = bool(hf["use_bias"])
    norm = NormConfig(kind="layer", eps=hf["norm_epsilon"], bias=True)
    mlp = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf), gated=False, up_bias=bias, down_bias=bias)
    config = llama_config(hf, architecture="Starcoder2ForCausalLM", qkv_bias=bias, out_bias=bias, window=hf.get("sliding_window"))
    return msgspec.structs.replace(replace_fields(config, layer={"norm": norm, "mlp": mlp}), norm=norm)


def starcoder2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of StarCoder 2 that make each engine module, by engine name; see `TensorNames`."""
    mlp = "model.layers.{i}.mlp"
    return llama_names(config) | {"layers.{i}.mlp.up": f"{mlp}.c_fc", "layers.{i}.mlp.down": f"{mlp}.c_proj"}


ARCHITECTURES = (
    Architecture(
        name="Starcoder2ForCausalLM",
        read_config=starcoder2_config,
        tensor_names=starcoder2_names,
        family="StarCoder 2",
        oracle="transformers",
        model_types=("starcoder2",),
        ignored_tensors=IGNORED,
        ignored_keys=(
            "activation_function",
            "scale_attn_weights",
            "layer_norm_epsilon",
        ),
    ),
)
