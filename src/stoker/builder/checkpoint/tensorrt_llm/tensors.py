"""How the tensors of the ranks of a TensorRT-LLM checkpoint make the tensors of a Hugging Face checkpoint.

`fc` is the gate projection and `gate` the up projection: TensorRT-LLM names the activated half of a gated MLP after that of a plain one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Data = dict[str, Any]  # of the config.json of TensorRT-LLM
# How a tensor is divided over tensor-parallel ranks:
#   rows      along the first axis (of a matrix, or of scales that follow its rows)
#   columns   along the last axis
#   same      every rank has the whole tensor
Split = Literal["rows", "columns", "same"]
Layout = Literal["", "heads", "groups", "halves"]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a layer: its Hugging Face names by part, and how its weight is divided over ranks.

    Several parts are fused: the rows of one rank are those of the first part, then those of the next one. `sizes` returns the rows of each
    part for all ranks together; without it, three parts are q, k and v, and two have the same size. In a module of experts, "{}" of a part
    is the index of the expert.

    `layout`: Hugging Face has one fused module, too, with the rows of all ranks in this order:

        heads     q, then k, then v; in general, one part after the other
        groups    for each key-value head, its queries, its key and its value; in general, an equal number of rows of each part for each of
                  `groups_key` groups, a key of config.json
        halves    gate, then up; a rank of TensorRT-LLM has up, then gate
    """

    parts: tuple[str, ...]
    split: Split
    of_experts: bool = False
    layout: Layout = ""
    sizes: Callable[[Data], tuple[int, ...]] | None = None
    groups_key: str = "num_key_value_heads"
    followed_by: str = ""  # a module of TensorRT-LLM whose rows follow those of this one in the Hugging Face module
    finish: Callable[[Tensor], Tensor] | None = None  # what is done to the merged tensor
    is_stacked: bool = False  # Hugging Face has the experts in one tensor [experts, out, in]


# Tensor of a linear → the tensor of a ModelOpt checkpoint.
SUFFIXES = {
    "weight": "weight", "bias": "bias", "weights_scaling_factor": "weight_scale", "per_channel_scale": "weight_scale",
    "zero": "weight_zero", "activation_scaling_factor": "input_scale", "prequant_scaling_factor": "pre_quant_scale",
    "weights_scaling_factor_2": "weight_scale_2", "act_scale": "input_scale", "smoother": "pre_quant_scale",
}  # fmt: skip
# The scales of integers in the order of a GPU: of each output feature, and of groups [groups, out].
SCALES_OF_INTEGERS = ("per_channel_scale", "weights_scaling_factor")
_LAYER = re.compile(r"(?:transformer|backbone)\.layers\.(\d{1,6})\.(.+)\.(\w+)$")
# Tensors that follow from others: the product of scales, the larger scale of keys and values, and a product of two weights.
NO_EFFECT = re.compile(r".*\.(alpha|kv_cache_rcp_scaling_factor|kv_orig_quant_scale|kv_quant_orig_scale|fused_q_proj)$")


def parse_layer_name(name: str) -> tuple[int, str, str] | None:
    """(index of the layer on its stage, module, suffix) of a tensor of a layer; None for other tensors."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2], match[3]) if match else None


def integer_bits(algorithm: Any) -> int:
    """The bits of the values that this algorithm stores in the order of a GPU; 0 for other algorithms, which keep the order of rows."""
    return {"W8A16": 8, "W4A16": 4, "W8A16_GPTQ": 8, "W4A16_GPTQ": 4}.get(algorithm, 0) if isinstance(algorithm, str) else 0


def split_of(module: Module, suffix: str, shape: tuple[int, ...]) -> Split:
    """How the tensor `suffix` of a module is divided, by its shape. Single numbers are equal on all ranks."""
    if shape in ((), (1,)) or module.split == "same":
        return "same"
    if suffix in ("prequant_scaling_factor", "smoother"):  # one factor per input feature
        return "columns" if module.split == "columns" else "same"
    if suffix in ("bias", "per_channel_scale", "weights_scaling_factor") and len(shape) == 1:  # one number per row, or one
        return "rows" if module.split == "rows" else "same"
    return module.split
