"""The table of quantization methods of checkpoints that can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker.base.errors import CheckpointError, StokerError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.auto_round import read_auto_round
from stoker.builder.prequantized.awq import read_awq
from stoker.builder.prequantized.bitsandbytes import read_bitsandbytes
from stoker.builder.prequantized.compressed_tensors import read_compressed_tensors
from stoker.builder.prequantized.fp8 import read_fp8
from stoker.builder.prequantized.gptq import read_gptq
from stoker.builder.prequantized.hqq import read_hqq
from stoker.builder.prequantized.modelopt import read_modelopt
from stoker.builder.prequantized.mxfp4 import read_mxfp4
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight, ReadWeights

Tensors = Mapping[str, TensorInfo]
Settings = dict[str, Any]  # quantization_config of config.json

Reader = Callable[[CheckpointWeights, Settings], ReadWeights]


def _from_headers(read: Callable[[Tensors, Settings], Mapping[str, PrequantizedWeight | DequantizedWeight]]) -> Reader:
    """A reader that needs the headers of tensors only."""
    return lambda weights, quantization: dict(read(weights.tensors, quantization))


# quant_method → the reader of the quantized weights.
METHODS: dict[str, Reader] = {
    "auto-round": _from_headers(read_auto_round),
    "awq": _from_headers(read_awq),
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _from_headers(read_fp8),
    "gptq": _from_headers(read_gptq),
    "hqq": read_hqq,
    "intel/auto-round": _from_headers(read_auto_round),
    "modelopt": _from_headers(read_modelopt),
    "mxfp4": _from_headers(read_mxfp4),
}


def read_quantized(weights: CheckpointWeights, quantization: Settings) -> ReadWeights:
    """The quantized weights of a checkpoint by name: those that a format stores unchanged, and those that are dequantized.

    Raises CheckpointError for an unsupported method or setting, and for tensors that do not fit them.
    """
    method = str(quantization.get("quant_method", "unknown"))
    if method not in METHODS:
        raise CheckpointError(
            f"The checkpoint is quantized already (quant_method: {method[:60]}), and this method is not supported.",
            cure=f"Build from the original checkpoint. Supported methods: {', '.join(METHODS)}.",
        )
    try:
        return METHODS[method](weights, quantization)
    except StokerError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as problem:
        where = weights.files[0] if weights.files else "The checkpoint"
        raise CheckpointError(
            f"{where}: the tensors do not fit the quantization_config of {method}: {type(problem).__name__} {str(problem)[:200]}.",
            cure=DOWNLOAD_AGAIN,
        ) from problem
