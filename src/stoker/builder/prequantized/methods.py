"""The table of quantization methods of checkpoints that can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.awq import read_awq
from stoker.builder.prequantized.compressed_tensors import read_compressed_tensors
from stoker.builder.prequantized.fp8 import read_fp8
from stoker.builder.prequantized.gptq import read_gptq
from stoker.builder.prequantized.mxfp4 import read_mxfp4
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight

Tensors = Mapping[str, TensorInfo]
Settings = dict[str, Any]  # quantization_config of config.json

# quant_method → the reader of weights that are imported without a change.
_PREQUANTIZED: dict[str, Callable[[Tensors, Settings], dict[str, PrequantizedWeight]]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
}

# quant_method → the reader of weights that are dequantized.
_DEQUANTIZED: dict[str, Callable[[Tensors, Settings], dict[str, DequantizedWeight]]] = {"mxfp4": read_mxfp4}


def find_prequantized(tensors: Tensors, quantization: Settings) -> dict[str, PrequantizedWeight] | None:
    """The weights that a format can store unchanged, by name. None if the method has no such format.

    Raises CheckpointError for unsupported settings, and for tensors that do not fit them.
    """
    reader = _PREQUANTIZED.get(str(quantization.get("quant_method", "")))
    return None if reader is None else reader(tensors, quantization)


def find_dequantized(tensors: Tensors, quantization: Settings) -> dict[str, DequantizedWeight]:
    """The weights that must be dequantized, by name.

    Raises CheckpointError for an unsupported method, and for scales that do not fit their weight.
    """
    method = str(quantization.get("quant_method", "unknown"))
    if method not in _DEQUANTIZED:
        raise CheckpointError(
            f"The checkpoint is quantized already ({method}), and this method is not supported.",
            cure=f"Build from the original checkpoint. Supported methods: {', '.join((*_PREQUANTIZED, *_DEQUANTIZED))}.",
        )
    return _DEQUANTIZED[method](tensors, quantization)
