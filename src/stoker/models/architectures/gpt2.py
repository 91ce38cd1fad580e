"""GPT-2, StarCoder and SantaCoder.

GPT-2 has learned positions and stores its weights transposed. StarCoder (GPTBigCode) is GPT-2 with one key-value head and plain weights.
SantaCoder was first published as GPT-2 with separate query and key-value weights.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import GPT_KEY_ALIASES, read_activation, replace_fields, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import group_qkv, transpose_conv1d, ungroup_qkv, untranspose_conv1d


@with_defaults(
    aliases=GPT_KEY_ALIASES, vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, layer_norm_epsilon=1e-5,
    scale_attn_weights=True, tie_word_embeddings=True, activation_function="gelu_new",
)  # fmt: skip
def gpt2_config(hf: dict[str, Any], *, architecture: str = "GPT2LMHeadModel", kv_heads: int | None = None) -> ModelConfig:
    """The ModelConfig of a GPT-2 checkpoint, from `hf`, the data of its config.json."""
    heads, size = hf["n_head"], hf["n_embd"] // hf["n_head"]
    scale = size**-0.5 if hf["scale_attn_weights"] else 1.0
    norm = NormConfig(kind="layer", eps=hf["layer_norm_epsilon"], bias=True)
    attention = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads or heads, head_size=size, qkv_bias=True, out_bias=True, scale=scale)
    width = value_or(hf, "n_inner", 4 * hf["n_embd"])
    mlp = MLPConfig(size=width, activation=read_activation(hf, "activation_function"), gated=False, up_bias=True, down_bias=True)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["n_embd"],
        max_positions=hf["n_positions"],
        layers=(LayerConfig(attention=attention, mlp=mlp, norm=norm),) * hf["n_layer"],
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
        learned_positions=hf["n_positions"],
    )
    if hf.get("scale_attn_by_inverse_layer_idx"):
        return replace_fields(config, attention=lambda i: {"scale": scale / (i + 1)})
    return config


@with_defaults(aliases=GPT_KEY_ALIASES, multi_query=True, activation_function="gelu_pytorch_tanh")
def bigcode_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a StarCoder checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, scale_attn_by_inverse_layer_idx=False)
    return gpt2_config(hf, architecture="GPTBigCodeForCausalLM", kv_heads=1 if hf["multi_query"] else None)


@with_defaults(aliases=GPT_KEY_ALIASES, attention_head_type="multihead")
def santacoder_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a SantaCoder checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_head_type="multiquery")
    return msgspec.structs.replace(gpt2_config(hf, kv_heads=1), architecture="GPT2LMHeadCustomModel")


def bigcode_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of StarCoder that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    return {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.ln_1",
        "layers.{i}.mlp_norm": f"{layer}.ln_2",
        "layers.{i}.attention.qkv": Transformed((f"{layer}.attn.c_attn",), ungroup_qkv, group_qkv, moves="rows"),
        "layers.{i}.attention.out": f"{layer}.attn.c_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.c_fc",
        "layers.{i}.mlp.down": f"{layer}.mlp.c_proj",
    }


def gpt2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GPT-2 that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    return bigcode_names(config) | {
        "layers.{i}.attention.qkv": Transformed((f"{layer}.attn.c_attn",), transpose_conv1d, untranspose_conv1d),
        "layers.{i}.attention.out": Transformed((f"{layer}.attn.c_proj",), transpose_conv1d, untranspose_conv1d),
        "layers.{i}.mlp.up": Transformed((f"{layer}.mlp.c_fc",), transpose_conv1d, untranspose_conv1d),
        "layers.{i}.mlp.down": Transformed((f"{layer}.mlp.c_proj",), transpose_conv1d, untranspose_conv1d),
    }


def santacoder_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of SantaCoder that make each engine module, by engine name; see `TensorNames`."""
    attention = "transformer.h.{i}.attn"
    sources = (f"{attention}.q_attn", f"{attention}.kv_attn")
    return gpt2_names(config) | {"layers.{i}.attention.qkv": Transformed(sources, transpose_conv1d, _queries_and_pairs)}


def _queries_and_pairs(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The Conv1D tensors of the queries, and of the keys and values, from the rows of all."""
    num_rows = config.hidden_size  # of the queries
    return tuple(untranspose_conv1d([part], config)[0] for part in tensors[0].tensor_split((num_rows,)))


_IGNORED = ("*.attn.bias", "*.attn.masked_bias")
_WITHOUT_PREFIX = ((r"^(h|wte|wpe|ln_f)\.", r"transformer.\1."),)  # checkpoints that were saved from the model without its head
ARCHITECTURES = (
    Architecture(
        name="GPT2LMHeadModel",
        read_config=gpt2_config,
        tensor_names=gpt2_names,
        family="GPT-2",
        oracle="transformers",
        model_types=("gpt2",),
        variant=lambda hf: "GPT2LMHeadCustomModel" if hf.get("attention_head_type") == "multiquery" else None,
        ignored_tensors=_IGNORED,
        tensor_renames=_WITHOUT_PREFIX,
        version_options={"gpt_model_version": lambda hf: ("gpt2",)},
    ),
    Architecture(
        name="GPTBigCodeForCausalLM",
        read_config=bigcode_config,
        tensor_names=bigcode_names,
        family="StarCoder, SantaCoder",
        oracle="transformers",
        model_types=("gpt_bigcode",),
        ignored_tensors=_IGNORED,
        tensor_renames=_WITHOUT_PREFIX,
        version_options={"gpt_model_version": lambda hf: ("starcoder", "santacoder") if hf.get("multi_query", True) else ("gpt2",)},
        ignored_keys=("num_key_value_heads", "inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    ),
    Architecture(
        name="GPT2LMHeadCustomModel",
        read_config=santacoder_config,
        tensor_names=santacoder_names,
        family="SantaCoder as first published",
        oracle="the same weights as GPTBigCode of transformers",
        ignored_tensors=_IGNORED,
        tensor_renames=_WITHOUT_PREFIX,
        version_options={"gpt_model_version": lambda hf: ("santacoder",)},
    ),
)
