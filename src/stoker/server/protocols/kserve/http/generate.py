"""The JSON of Triton's generate extension: inputs and outputs by name as scalars or flat lists. Output keys are sorted."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import TEXT, Inference, Response, ServedModel, Tensors, encoding_cache
from stoker.server.protocols.kserve.model_config import Tensor
from stoker.server.protocols.kserve.tensors import dtypes
from stoker.server.protocols.kserve.tensors.signature import by_role, check_present

_SCALAR_TYPES = {"STRING": str, "BOOL": bool, "INT32": int}
_encode = msgspec.json.Encoder().encode


def read_generate_request(message: dict[str, Any], served: ServedModel) -> Inference:
    """Check a request and convert its members to arrays, by the model's declared inputs. Raises TritonError with Triton's text."""
    nested = message.get("parameters")
    request_id = message.get("id", "")
    flat = (nested if isinstance(nested, dict) else {}) | {k: v for k, v in message.items() if k not in ("id", "parameters")}
    declared = served.inputs
    inference = Inference(model=served.model, request_id=str(request_id), single=served.unary)
    tensors: Tensors = {}
    for name, value in flat.items():
        if name in declared:
            tensors[name] = _tensor(declared[name], value, batched=served.model.max_batch_size > 0)
        elif isinstance(value, (bool, int, str)):
            inference.parameters[name] = value
        else:
            raise TritonError(f"parameter '{name[:80]}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    check_present(inference, tensors)  # `_tensor` has checked dtypes and shapes
    inference.inputs = by_role(served.model, declared, tensors)
    return inference


def _tensor(tensor: Tensor, value: Any, *, batched: bool) -> np.ndarray:
    """The array of an input's value: a list, or a scalar, which stands for a list of one.

    Raises TritonError if it does not fit the dims.
    """
    if tensor.dims == (1,) and type(value) is _SCALAR_TYPES.get(tensor.dtype) and (type(value) is not int or -(1 << 31) <= value < 1 << 31):
        scalar = _scalar(tensor.dtype, value)
        return scalar[None] if batched else scalar
    flat = value if isinstance(value, list) else [value]
    shape = _shape(tensor, len(flat))
    array = dtypes.from_json(dtypes.kserve_name(tensor.dtype), shape, flat)
    return array[None] if batched else array


def _scalar(dtype: str, value: Any) -> np.ndarray:
    """An array [1] of a value whose type was checked."""
    if dtype == "STRING":
        value = value.encode("utf-8", "surrogatepass")
    array = np.empty(1, dtypes.DTYPES[dtypes.kserve_name(dtype)])
    array[0] = value
    return array


def _shape(tensor: Tensor, count: int) -> tuple[int, ...]:
    """The shape of an input with `count` elements: the only variable dim is set to fit. Raises TritonError if no shape fits."""
    fixed = math.prod(dim for dim in tensor.dims if dim >= 0)
    num_variable = tensor.dims.count(-1)
    if count != fixed if not num_variable else fixed == 0 or count % fixed or (num_variable > 1 and count != fixed):
        raise TritonError(f"The schema can not convert input '{tensor.name}' to tensor with proper shape")
    return tuple(count // fixed if dim == -1 and num_variable == 1 else max(dim, 1) if dim == -1 else dim for dim in tensor.dims)


class ResponseWriter:
    """Encodes the responses of one request as JSON."""

    def __init__(self, served: ServedModel, inference: Inference) -> None:
        self._common: dict[str, Any] = {"model_name": served.model.name, "model_version": served.version}
        if inference.request_id:
            self._common["id"] = inference.request_id
        self._cache = encoding_cache(served, inference, "generate")

    def body(self, response: Response) -> bytes:
        """The whole response."""
        if response.text is None:
            return _encode(dict(sorted(self._values(response).items())))
        before, after = self._cache.get(response, self._around_text)
        return b"%b%b%b" % (before, _encode(response.text), after)

    def event(self, response: Response) -> bytes:
        """The response as a server-sent event."""
        return b"data: %b\n\n" % self.body(response)

    def _values(self, response: Response) -> dict[str, Any]:
        """The members of the response: model name and version, parameters, and outputs. A tensor of one element is a scalar."""
        values = self._common | response.parameters
        for name, array in response.outputs.items():
            flat = dtypes.to_json(array)
            values[name] = flat[0] if len(flat) == 1 else flat
        return values

    def _around_text(self, response: Response) -> tuple[bytes, bytes]:
        """The JSON before and after the text, with sorted keys."""
        ordered = sorted(self._values(response).items())
        before = _encode(dict(item for item in ordered if item[0] < TEXT))[:-1]
        after = _encode(dict(item for item in ordered if item[0] > TEXT))[1:]
        return before + b',"text_output":'[before == b"{" :], (b"," if len(after) > 1 else b"") + after


def error_event(message: str) -> bytes:
    """An error as a server-sent event."""
    return b"data: " + _encode({"error": message}) + b"\n\n"
