"""How the tensors of the ranks of a TensorRT-LLM checkpoint make the tensors of a Hugging Face checkpoint.

`fc` is the gate projection and `gate` the up projection: TensorRT-LLM names the activated half of a gated MLP after that of a plain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# How a tensor is divided over tensor-parallel ranks:
#   rows      along the first axis (of a matrix, or of scales that follow its rows)
#   columns   along the last axis
#   same      every rank has the whole tensor
Split = Literal["rows", "columns", "same"]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a layer: its Hugging Face names by part, and how its weight is divided over ranks."""

    parts: tuple[str, ...]  # several: the rows of one rank are those of the first part, then those of the next one
    split: Split


LAYER_MODULES = {
    "attention.qkv": Module(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "rows"),
    "attention.dense": Module(("self_attn.o_proj",), "columns"),
    "attention.q_layernorm": Module(("self_attn.q_norm",), "same"),
    "attention.k_layernorm": Module(("self_attn.k_norm",), "same"),
    "mlp.fc": Module(("mlp.gate_proj",), "rows"),
    "mlp.gate": Module(("mlp.up_proj",), "rows"),
    "mlp.proj": Module(("mlp.down_proj",), "columns"),
    "mlp.router": Module(("block_sparse_moe.gate",), "same"),
    "input_layernorm": Module(("input_layernorm",), "same"),
    "post_layernorm": Module(("post_attention_layernorm",), "same"),
}
OUTER_MODULES = {"transformer.vocab_embedding": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}

# Tensor of a linear → the tensor of a ModelOpt checkpoint.
SUFFIXES = {
    "weight": "weight", "bias": "bias", "weights_scaling_factor": "weight_scale", "per_channel_scale": "weight_scale",
    "activation_scaling_factor": "input_scale", "prequant_scaling_factor": "pre_quant_scale", "weights_scaling_factor_2": "weight_scale_2",
}  # fmt: skip
_LAYER = re.compile(r"transformer\.layers\.(\d{1,6})\.(.+)\.(\w+)$")
# Tensors that follow from others: the product of scales, and the larger scale of keys and values.
NO_EFFECT = re.compile(r".*\.(alpha|kv_cache_rcp_scaling_factor|kv_orig_quant_scale|kv_quant_orig_scale)$")


def parse_layer_name(name: str) -> tuple[int, str, str] | None:
    """(index of the layer on its stage, module, suffix) of a tensor of a layer; None for other tensors."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2], match[3]) if match else None


def split_of(module: Module, suffix: str, shape: tuple[int, ...]) -> Split:
    """How the tensor `suffix` of a module is divided, by its shape. Single numbers are equal on all ranks."""
    if shape in ((), (1,)) or module.split == "same":
        return "same"
    if suffix == "prequant_scaling_factor":  # one factor per input feature
        return "columns" if module.split == "columns" else "same"
    if suffix in ("bias", "per_channel_scale", "weights_scaling_factor") and len(shape) == 1:  # one number per row, or one
        return "rows" if module.split == "rows" else "same"
    return module.split
