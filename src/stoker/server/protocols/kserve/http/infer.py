"""The bodies of /infer requests and responses: JSON, followed by the bytes of binary tensors if there are any."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.http.json_body import read_object
from stoker.server.protocols.kserve.inference import Inference, Parameters, Response, ServedModel, Tensors
from stoker.server.protocols.kserve.shared_memory.placement import read_placement
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
from stoker.server.protocols.kserve.tensors import dtypes
from stoker.server.protocols.kserve.tensors.signature import check_tensors

HEADER_LENGTH = b"inference-header-content-length"


class InferCall(msgspec.Struct):
    """A checked request, and which outputs the response contains as bytes."""

    inference: Inference
    binary: dict[str, bool] = {}
    binary_default: bool = False

    def is_binary(self, name: str) -> bool:
        """Whether the response contains this output as bytes after its JSON."""
        return self.binary.get(name, self.binary_default)


def read_infer_request(body: bytes, header_length: bytes | None, served: ServedModel, memory: SharedMemory) -> InferCall:
    """Check a body and convert its inputs to arrays, from `memory` if they are there. Raises TritonError with Triton's text.

    `header_length` is the value of the header Inference-Header-Content-Length: the size of the JSON, after which binary tensors follow.
    """
    view = memoryview(body)
    size = _header_size(header_length, len(body))
    if not size:
        raise TritonError(
            f"[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got {len(served.model.inputs)} "
            f"inputs in '{served.model.name}' model configuration"
        )
    message = read_object(view[:size])
    inference = Inference(model=served.model, request_id=request_id(message), parameters=parameters(message), single=True)
    call = InferCall(inference, binary_default=inference.parameters.get("binary_data_output") is True)
    _read_outputs(message, call, memory)
    tensors, types = _read_inputs(message, view[size:], served.model.name, memory)
    check_tensors(inference, tensors, types)
    return call


def _header_size(header: bytes | None, size: int) -> int:
    """The size of the JSON at the start of a body of `size` bytes. Without the header, all of it. Raises TritonError."""
    if header is None:
        return size
    if not header.isdigit() or len(header) > 12 or int(header) > size:
        raise TritonError(f"Unable to parse Inference-Header-Content-Length: {header[:40].decode('latin-1')!r} of a body of {size} bytes")
    return int(header)


def request_id(message: dict[str, Any]) -> str:
    """The id in a request, as text. Empty if absent. Raises TritonError if it is neither text nor a whole number."""
    value = message.get("id", "")
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TritonError("Unable to parse 'id': attempt to access JSON non-string as string", 500)
    return str(value)


def parameters(message: dict[str, Any]) -> Parameters:
    """The parameters of a request or tensor. Raises TritonError for a value that is not a scalar."""
    values = message.get("parameters", {})
    if not isinstance(values, dict):
        raise TritonError("Unable to parse 'parameters': attempt to access JSON non-object as object", 500)
    for name, value in values.items():
        if not isinstance(value, (bool, int, str, float)):
            raise TritonError(f"parameter '{name[:80]}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    return values


def _read_outputs(message: dict[str, Any], call: InferCall, memory: SharedMemory) -> None:
    """Set the requested outputs of the call, which of them are binary, and which are in shared memory."""
    names = []
    for output in _objects(message.get("outputs", []), "outputs"):
        name, options = _name(output, "outputs"), parameters(output)
        refuse_classification(name, options)
        if (placement := read_placement(name, options)) is not None:
            memory.check_range(placement.region, placement.offset, placement.byte_size)
            call.inference.placements = call.inference.placements | {name: placement}
        if "binary_data" in options:
            call.binary[name] = options["binary_data"] is True
        names.append(name)
    call.inference.outputs = tuple(dict.fromkeys(names))


def refuse_classification(name: str, options: Parameters) -> None:
    """Raise TritonError if the parameters of an output request classification."""
    if options.get("classification"):
        raise TritonError(f"classification of output '{name}' is not supported. Request the tensor itself.")


def _read_inputs(message: dict[str, Any], raw: memoryview, model: str, memory: SharedMemory) -> tuple[Tensors, dict[str, str]]:
    """(tensors, dtypes) by name. `raw` are the bytes after the JSON, in the order of the inputs."""
    if "inputs" not in message:
        raise TritonError("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'", 500)
    tensors: Tensors = {}
    types, at = {}, 0
    for item in _objects(message["inputs"], "inputs"):
        name, dtype = _name(item, "inputs"), item.get("datatype")
        if name in tensors:
            raise TritonError(f"input '{name}' already exists in request")
        if not isinstance(dtype, str) or dtype not in dtypes.DTYPES:
            raise TritonError(f"invalid datatype for input {name}")
        shape = dtypes.check_shape(name, item.get("shape"))
        options = parameters(item)
        if (placement := read_placement(name, options)) is not None:
            tensors[name] = dtypes.from_raw(name, dtype, shape, placement.read(memory), model)
        elif "binary_data_size" in options:
            size = _binary_size(name, options["binary_data_size"], len(raw) - at)
            tensors[name] = dtypes.from_raw(name, dtype, shape, raw[at : at + size], model)
            at += size
        else:
            tensors[name] = _from_data(item, dtype, shape)
        types[name] = dtype
    if at != len(raw):
        raise TritonError(f"unexpected additional input data for model '{model}': {len(raw) - at} bytes belong to no input")
    return tensors, types


def _from_data(item: dict[str, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor in the member `data` of an input. Raises TritonError if it is missing or does not fit type and shape."""
    if "data" not in item:
        raise TritonError("Unable to parse 'data': attempt to access non-existing object member 'data'", 500)
    return dtypes.from_json(dtype, shape, item["data"])


def _binary_size(name: str, size: Any, left: int) -> int:
    """`size`, the number of bytes of an input, checked: `left` bytes of the body have not been read. Raises TritonError."""
    if type(size) is not int or size < 0:
        raise TritonError(f"Unable to parse 'binary_data_size' of input '{name}': it must be a whole number from 0")
    if size > left:
        raise TritonError(f"unexpected size for input '{name}', expecting {size} bytes but only {left} bytes are left in the request")
    return size


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """`value`, checked to be a list of objects. Raises TritonError with the name of the member."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TritonError(f"Unable to parse '{name}': attempt to access JSON non-array as array", 500)
    return value


def _name(item: dict[str, Any], where: str) -> str:
    """The name of an input or output. Raises TritonError if it has none."""
    name = item.get("name")
    if not isinstance(name, str):
        raise TritonError(f"Unable to parse '{where}': attempt to access non-existing object member 'name'", 500)
    return name


def write_infer_response(served: ServedModel, call: InferCall, response: Response, memory: SharedMemory) -> tuple[bytes, int | None]:
    """(body, length of its JSON if bytes follow, otherwise None). Stores outputs that are requested in shared memory."""
    inference, raws, outputs = call.inference, [], []
    for name, array in response.tensors().items():
        output: dict[str, Any] = {"name": name, "datatype": _datatype(served, name), "shape": list(array.shape)}
        if (placement := inference.placements.get(name)) is not None:
            output["parameters"] = placement.write(memory, name, array)
        elif call.is_binary(name):
            raws.append(dtypes.to_raw(array))
            output["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            output["data"] = dtypes.to_json(array)
        outputs.append(output)
    head: dict[str, Any] = {"id": inference.request_id} if inference.request_id else {}
    head |= {"model_name": served.model.name, "model_version": served.version}
    if response.parameters:
        head["parameters"] = response.parameters
    text = msgspec.json.encode(head | {"outputs": outputs})
    return (text, None) if not raws else (b"".join([text, *raws]), len(text))


def _datatype(served: ServedModel, name: str) -> str:
    """KServe's data type of an output of the model."""
    return next(dtypes.kserve_name(tensor.dtype) for tensor in served.model.outputs if tensor.name == name)
