"""W8A8_SQ of convert_checkpoint.py (int8 weights and inputs), with the tensors that ModelOpt has for it.

With int8 weights w [out, in] and the int8 input q of a linear, TensorRT-LLM computes (`SmoothQuantLinear`, `generate_int8`)

    per token    q = round(x ÷ s), s = max|x| ÷ 127          y = (q · w) × s × per_channel_scale
    per tensor   q = round(x × f), f = quantizing factor     y = (q · w) × act_scale × per_channel_scale

act_scale is the step of the output, and per_channel_scale the product of the steps of input and weight divided by it. The scale of the
weight is therefore act_scale × per_channel_scale × f, and that of the input 1 ÷ f. f is stored with the module that computes x: the norm,
the attention or the MLP. The inputs of `dense` and `proj` are divided by `smoother` [in] first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.weights import TensorInfo

# Algorithm → whether inputs have a scale per token. Otherwise they have a measured one.
ALGORITHMS = {
    "W8A8_SQ_PER_TENSOR_PLUGIN": False,
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": False,
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": True,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": True,
}
MODELOPT_ALGORITHM = "W8A8_SQ_PER_CHANNEL"  # under which the converted tensors are read
QUANTIZING_FACTORS = ("scale_to_int", "quantization_scaling_factor")  # suffixes; used with the linears that read the values
# Linear → the quantizing factor of its input.
_FACTOR_OF = {
    "attention.qkv": "input_layernorm.scale_to_int",
    "attention.dense": "attention.quantization_scaling_factor",
    "mlp.fc": "post_layernorm.scale_to_int",
    "mlp.gate": "post_layernorm.scale_to_int",
    "mlp.proj": "mlp.quantization_scaling_factor",
}
_LEAST_MAGNITUDE = 64  # of the largest value of a weight. Rounding to int8 makes it 127
Load = Callable[[SafetensorsWeights], Tensor]


class SmoothQuantScales:
    """The scales of a checkpoint whose inputs have a scale per token (`per_token`), or a measured one."""

    def __init__(self, *, per_token: bool) -> None:
        self._per_token = per_token

    def find(self, rank: SafetensorsWeights, name: str, suffix: str) -> tuple[TensorInfo, Load] | None:
        """(info, function to read it from a rank) of the scale `name`; None for other tensors.

        Raises CheckpointError if the quantizing factor of the linear is missing.
        """
        if suffix not in ("smoother", "per_channel_scale", "act_scale"):
            return None
        size = rank.tensors[name].shape[-1:]
        _check_count(rank, name, *size)
        if suffix == "smoother":
            return TensorInfo(size, torch.float32), lambda rank: 1 / rank.read(name).float().flatten()
        shape = () if size == (1,) else size
        if suffix == "per_channel_scale" and self._per_token:
            return TensorInfo(shape, torch.float32), lambda rank: rank.read(name).float().reshape(shape)
        factor = self._factor_name(rank, name.removesuffix(f".{suffix}"))
        if suffix == "act_scale":
            return TensorInfo((), torch.float32), lambda rank: 1 / rank.read(factor).float().reshape(())
        output_step = f"{name.removesuffix(suffix)}act_scale"

        def weight_scale(rank: SafetensorsWeights) -> Tensor:
            """The scale of the weight, one number or [out]."""
            product = rank.read(name).double() * rank.read(output_step).double() * rank.read(factor).double()
            return product.float().reshape(shape)

        return TensorInfo(shape, torch.float32), weight_scale

    def _factor_name(self, rank: SafetensorsWeights, module: str) -> str:
        """The name of the quantizing factor of the input of a module of a layer."""
        layer, _, linear = module.partition("layers.")[2].partition(".")
        name = f"{module.removesuffix(linear)}{_FACTOR_OF.get(linear, '')}"
        missing = [one for one in (name, f"{module}.act_scale") if one not in rank.tensors]
        if linear not in _FACTOR_OF or missing:
            wrong = missing[0] if linear in _FACTOR_OF else f"the quantizing factor of {module}"
            raise CheckpointError(f"{rank.files[0]}: {wrong} is missing in layer {layer}.", cure=DOWNLOAD_AGAIN)
        for one in (name, f"{module}.act_scale"):
            _check_count(rank, one, 1)
        return name


def _check_count(rank: SafetensorsWeights, name: str, count: int = 1) -> None:
    """Raise CheckpointError unless a tensor has `count` numbers of a floating-point dtype."""
    info = rank.tensors[name]
    if math.prod(info.shape) != count or not info.dtype.is_floating_point:
        expected = f"{count} numbers" if count > 1 else "one number"
        raise CheckpointError(f"{rank.location(name)} {list(info.shape)} {info.dtype} is not {expected}.", cure=DOWNLOAD_AGAIN)


def smoothquant_scales(algorithm: Any) -> SmoothQuantScales | None:
    """The scales of a checkpoint with this quant_algo; None for another algorithm."""
    return SmoothQuantScales(per_token=ALGORITHMS[algorithm]) if isinstance(algorithm, str) and algorithm in ALGORITHMS else None


def check_magnitude(values: Tensor, where: str) -> None:
    """Raise CheckpointError for int8 values that are almost all 0.

    `generate_int8` multiplies the weight of q, k and v by its scale instead of dividing, if there are fewer key-value heads than heads and
    the weight has one scale for each of the three.
    """
    largest = int(values.int().abs().max())
    if largest < _LEAST_MAGNITUDE:
        raise CheckpointError(
            f"{where} has values up to {largest} of 127: convert_checkpoint.py of TensorRT-LLM rounds q, k and v of models with grouped "
            "key-value heads to 0 without --per_channel.",
            cure="Convert with --per_channel, or build from the Hugging Face checkpoint with --quantize SMOOTH_QUANT.",
        )
