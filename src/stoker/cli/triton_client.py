"""tritonclient for the commands: its module by protocol, and values as the tensors that Stoker's table of inputs declares."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from stoker.base.errors import DependencyError
from stoker.server.protocols.kserve.dtypes import DTYPES, kserve_name, text_array
from stoker.server.schemas.triton_models import Tensor
from stoker.server.schemas.triton_models import tensors as declared

_INPUTS: dict[str, Tensor] = {
    tensor.name: tensor for kind in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble") for tensor in declared(kind)[0]
}


def module(protocol: str) -> Any:
    """tritonclient.grpc or tritonclient.http. Raises DependencyError."""
    try:
        return importlib.import_module(f"tritonclient.{protocol}")
    except ImportError:
        raise DependencyError("tritonclient", "this command", "grpc") from None


def tensors(client: Any, values: dict[str, Any]) -> list[Any]:
    """Inputs of one row."""
    made = []
    for name, value in values.items():
        dtype = kserve_name(_INPUTS[name].dtype)
        items = value if isinstance(value, list) else [value]
        shape = (1, len(items))
        array = text_array([item.encode() for item in items], shape) if dtype == "BYTES" else np.array([items], DTYPES[dtype])
        made.append(client.InferInput(name, list(shape), dtype))
        made[-1].set_data_from_numpy(array)
    return made
