"""A weight of a pre-quantized checkpoint: the tensors it consists of, and how they become stored tensors or plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stoker.builder.checkpoint.weights import TensorInfo
from stoker.quant.format import Format


@dataclass(frozen=True, slots=True)
class PrequantizedWeight:
    """A weight [out, in], or [experts, out, in], that a format can store unchanged."""

    sources: tuple[str, ...]  # the checkpoint tensors that it consists of
    shape: tuple[int, ...]  # of the plain weight
    format: Format
    repack: Callable[[list[Tensor]], dict[str, Tensor]]  # tensors of `sources` → the stored tensors of `format`, by suffix
    input_factors: str = ""  # the tensor [in] by which the input is multiplied first, if any; it is not among `sources`
    is_transposed: bool = False  # the plain weight is [experts, in, out], though the stored tensors are [experts, out, …]


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """A weight that is converted to plain numbers when it is read, because no format of the engine holds it."""

    sources: tuple[str, ...]
    info: TensorInfo  # shape and dtype after the conversion
    dequantize: Callable[[list[Tensor]], Tensor]  # tensors of `sources` → the weight


ReadWeights = dict[str, PrequantizedWeight | DequantizedWeight]  # the quantized weights of a checkpoint by name
