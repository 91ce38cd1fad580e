"""InternLM 1 (Llama with biases), InternLM 2 (q, k and v fused in groups) and InternLM 3 (Llama)."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import value_or, with_defaults
from stoker.models.config_values import OBJECT
from stoker.models.tensor_transforms import group_qkv, ungroup_qkv


@with_defaults(vocab_size=103168, bias=True, max_position_embeddings=2048)
def internlm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an InternLM 1 checkpoint, from `hf`, the data of its config.json."""
    rotary = value_or(hf, "rotary", {})
    scaling = {"type": "dynamic", "factor": rotary.get("scaling_factor", 1.0)} if rotary.get("type") == "dynamic" else None
    hf = {"rope_theta": rotary.get("base", 10000), "rope_scaling": scaling} | hf
    return llama_config(hf, architecture="InternLMForCausalLM", qkv_bias=bool(hf["bias"]), out_bias=bool(hf["bias"]))


@with_defaults(vocab_size=103168, bias=True, max_position_embeddings=2048)
def internlm2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an InternLM 2 checkpoint, from `hf`, the data of its config.json."""
    return llama_config(hf, architecture="InternLM2ForCausalLM", qkv_bias=bool(hf["bias"]), out_bias=bool(hf["bias"]))


def internlm2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of InternLM 2 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    return {
        "embed": "model.tok_embeddings",
        "norm": "model.norm",
        "head": "output",
        "layers.{i}.attention_norm": f"{layer}.attention_norm",
        "layers.{i}.mlp_norm": f"{layer}.ffn_norm",
        "layers.{i}.attention.qkv": Transformed((f"{layer}.attention.wqkv",), ungroup_qkv, group_qkv, moves="rows"),
        "layers.{i}.attention.out": f"{layer}.attention.wo",
        "layers.{i}.mlp.up": (f"{layer}.feed_forward.w1", f"{layer}.feed_forward.w3"),
        "layers.{i}.mlp.down": f"{layer}.feed_forward.w2",
    }


@with_defaults(
    vocab_size=128512, intermediate_size=10240, num_hidden_layers=48, num_key_value_heads=2, head_dim=128,
    max_position_embeddings=32768, rms_norm_eps=1e-5,
)  # fmt: skip
def internlm3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of InternLM 3. The publisher's keys are qkv_bias and bias, transformers' are attention_bias and mlp_bias.

    `bias` applies to the output projection, too.
    """
    bias = bool(hf.get("bias", hf.get("mlp_bias", False)))
    qkv_bias = bool(hf.get("qkv_bias", hf.get("attention_bias", False)))
    return llama_config(hf | {"mlp_bias": bias}, architecture="InternLM3ForCausalLM", qkv_bias=qkv_bias, out_bias=bias)


ARCHITECTURES = (
    Architecture(
        name="InternLMForCausalLM",
        read_config=internlm_config,
        tensor_names=llama_names,
        family="InternLM 1",
        oracle="the same weights as Llama of transformers, with biases",
        model_types=("internlm",),
        ignored_tensors=IGNORED,
        kinds={"rotary": OBJECT},
    ),
    Architecture(
        name="InternLM2ForCausalLM",
        read_config=internlm2_config,
        tensor_names=internlm2_names,
        family="InternLM 2, 2.5",
        oracle="the same weights as Llama of transformers",
        model_types=("internlm2",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="InternLM3ForCausalLM",
        read_config=internlm3_config,
        tensor_names=llama_names,
        family="InternLM 3",
        oracle="transformers",
        model_types=("internlm3",),
        ignored_tensors=IGNORED,
    ),
)
