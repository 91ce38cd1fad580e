"""Converts ModelInferRequest to tensors, and responses to the bytes of ModelInferResponse.

Protobuf allows to concatenate the encodings of fields, so the fields that are equal in all responses of a request are encoded once.
Building each message with protobuf's Python classes takes several times as long.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.http.infer import refuse_classification
from stoker.server.protocols.kserve.inference import TEXT, TEXT_SHAPE, Inference, Parameters, Response, ServedModel, Tensors, encoding_cache
from stoker.server.protocols.kserve.shared_memory.placement import read_placement
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
from stoker.server.protocols.kserve.tensors import dtypes
from stoker.server.protocols.kserve.tensors.signature import check_tensors

FINAL = "triton_final_response"
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# Tags of the fields that are written by hand: (field number << 3) | 2, where 2 is the wire type of a field with a length.
_RAW_OUTPUT = b"\x32"  # ModelInferResponse.raw_output_contents = 6
_OUTPUT = b"\x2a"  # ModelInferResponse.outputs = 5
_INFER_RESPONSE = b"\x12"  # ModelStreamInferResponse.infer_response = 2
_ONE_BYTE_VARINTS = [bytes([length]) for length in range(0x80)]


def parse(message_type: Any, data: bytes) -> Any:
    """The protobuf message of these bytes. Raises TritonError if they are malformed."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise TritonError(f"the {len(data)} bytes of the request are not a valid {message_type.DESCRIPTOR.full_name} message") from None


def read_infer_message(request: Any, served: ServedModel, memory: SharedMemory) -> Inference:
    """Check a ModelInferRequest and convert its inputs to arrays, from `memory` if they are there.

    Raises TritonError with Triton's text.
    """
    inference = Inference(model=served.model, request_id=request.id, parameters=parameters(request.parameters))
    for output in request.outputs:
        options = parameters(output.parameters)
        refuse_classification(output.name, options)
        if (placement := read_placement(output.name, options)) is not None:
            memory.check_range(placement.region, placement.offset, placement.byte_size)
            inference.placements = inference.placements | {output.name: placement}
    inference.outputs = tuple(dict.fromkeys(output.name for output in request.outputs))
    tensors: Tensors = {}
    types = {}
    placements = [read_placement(tensor.name, parameters(tensor.parameters)) for tensor in request.inputs]
    raws, num_sent = iter(request.raw_input_contents), placements.count(None)
    if request.raw_input_contents and len(request.raw_input_contents) != num_sent:
        raise TritonError(
            f"expected raw_input_contents to be {num_sent} (one for each input), got {len(request.raw_input_contents)} "
            f"for model '{served.model.name}'"
        )
    for tensor, placement in zip(request.inputs, placements, strict=True):
        if tensor.name in tensors:
            raise TritonError(f"input '{tensor.name}' already exists in request")
        if tensor.datatype not in dtypes.DTYPES:
            raise TritonError(f"invalid datatype for input {tensor.name}")
        shape = dtypes.check_shape(tensor.name, tensor.shape[: dtypes.MAX_DIMS + 1])
        if placement is not None:
            tensors[tensor.name] = dtypes.from_raw(tensor.name, tensor.datatype, shape, placement.read(memory), served.model.name)
        elif request.raw_input_contents:
            tensors[tensor.name] = dtypes.from_raw(tensor.name, tensor.datatype, shape, next(raws), served.model.name)
        else:
            tensors[tensor.name] = _from_contents(tensor, shape, served.model.name)
        types[tensor.name] = tensor.datatype
    check_tensors(inference, tensors, types)
    return inference


def _from_contents(tensor: Any, shape: tuple[int, ...], model: str) -> np.ndarray:
    """The tensor of an input whose values are in `contents` instead of raw_input_contents."""
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise TritonError(f"input '{tensor.name}' of {tensor.datatype} must be in raw_input_contents")
    items = getattr(tensor.contents, field)
    if len(items) != math.prod(shape):
        size = dtypes.DTYPES[tensor.datatype].itemsize
        sizes = f"Expected {math.prod(shape) * size}, got {len(items) * size}"
        raise TritonError(f"input byte size mismatch for input '{tensor.name}' for model '{model}'. {sizes}")
    if tensor.datatype == "BYTES":
        return dtypes.text_array(items, shape)
    kind = dtypes.DTYPES[tensor.datatype]
    try:
        steps = [np.array(items[at : at + dtypes.STEP], kind) for at in range(0, len(items), dtypes.STEP)]
        return np.concatenate([np.empty(0, kind), *steps]).reshape(shape)
    except OverflowError:
        raise TritonError(f"input '{tensor.name}' has a number that does not fit {tensor.datatype}") from None


def parameters(fields: Any) -> Parameters:
    """A map of InferParameter messages as Python values. Raises TritonError for a message without a value."""
    values = {}
    for name in fields:
        kind = fields[name].WhichOneof("parameter_choice")
        if kind is None:
            raise TritonError(f"parameter '{name[:80]}' has invalid type. It should be either 'int', 'bool', or 'string'.")
        values[name] = getattr(fields[name], kind)
    return values


class Encoder:
    """Encodes the responses of one request as the bytes of ModelInferResponse."""

    def __init__(self, served: ServedModel, inference: Inference, memory: SharedMemory) -> None:
        self._placements, self._memory = inference.placements, memory
        self._head: bytes = pb.ModelInferResponse(
            model_name=served.model.name, model_version=served.version, id=inference.request_id
        ).SerializeToString()
        self._types = {tensor.name: dtypes.kserve_name(tensor.dtype) for tensor in served.model.outputs}
        self._declared: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._encoded: dict[tuple[tuple[str, Any], ...], bytes] = {}
        self._whole_cache = encoding_cache(served, inference, "grpc")
        self._streamed_cache = encoding_cache(served, inference, "grpc stream")

    def whole(self, response: Response) -> bytes:
        """The bytes of a ModelInferResponse."""
        if self._placements:
            return self._with_placements(response, response.parameters)
        if response.text is None:
            return self._without_text(response, response.parameters)
        before: bytes = self._whole_cache.get(response, self._before_text)
        return before + _raw_text(response.text)

    def streamed(self, response: Response) -> bytes:
        """The response as the bytes of a ModelStreamInferResponse. Errors are encoded by `stream_error`."""
        if response.text is None or self._placements:
            encode = self._with_placements if self._placements else self._without_text
            inner = encode(response, response.parameters | {FINAL: response.final})
            return b"".join((_INFER_RESPONSE, varint(len(inner)), inner))
        before, text = self._streamed_cache.get(response, self._before_streamed_text), _raw_text(response.text)
        return b"".join((_INFER_RESPONSE, varint(len(before) + len(text)), before, text))

    def _with_placements(self, response: Response, parameters: Parameters) -> bytes:
        """The bytes of a response of which some outputs are written to shared memory. The message contains no data of these outputs."""
        fields, raws = [self._head, self._parameters(tuple(parameters.items()))], []
        for name, array in response.tensors().items():
            message = pb.ModelInferResponse()
            output = message.outputs.add(name=name, datatype=self._types[name], shape=array.shape)
            if (placement := self._placements.get(name)) is not None:
                for key, value in placement.write(self._memory, name, array).items():
                    set_parameter(output.parameters[key], value)
            fields.append(message.SerializeToString())
            raws.append(b"" if placement is not None else dtypes.to_raw(array))
        return b"".join([*fields, pb.ModelInferResponse(raw_output_contents=raws).SerializeToString()])

    def _before_text(self, response: Response) -> bytes:
        """The message without the raw contents of its text."""
        return self._without_text(response, response.parameters)

    def _before_streamed_text(self, response: Response) -> bytes:
        """The message of a stream without the raw contents of its text. It says whether it is the last one."""
        return self._without_text(response, response.parameters | {FINAL: response.final})

    def _without_text(self, response: Response, parameters: Parameters) -> bytes:
        """Everything except for the raw contents of the text, which is the last tensor if the response has one."""
        fields = [self._head, self._parameters(tuple(parameters.items()))]
        fields += [self._output(name, array.shape) for name, array in response.outputs.items()]
        if response.text is not None:
            fields.append(self._output(TEXT, TEXT_SHAPE))
        for array in response.outputs.values():
            raw = dtypes.to_raw(array)
            fields += (_RAW_OUTPUT, varint(len(raw)), raw)
        return b"".join(fields)

    def _output(self, name: str, shape: tuple[int, ...]) -> bytes:
        """The encoded declaration of an output. Cached by name and shape."""
        key = (name, shape)
        if key not in self._declared:
            message = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=self._types[name], shape=shape).SerializeToString()
            self._declared[key] = _OUTPUT + varint(len(message)) + message
        return self._declared[key]

    def _parameters(self, items: tuple[tuple[str, Any], ...]) -> bytes:
        """The encoded parameters. Cached."""
        if items not in self._encoded:
            message = pb.ModelInferResponse()
            for name, value in items:
                set_parameter(message.parameters[name], value)
            self._encoded[items] = message.SerializeToString()
        return self._encoded[items]


def set_parameter(message: Any, value: Any) -> None:
    """Set an InferParameter message to a Python value."""
    if isinstance(value, bool):
        message.bool_param = value
    elif isinstance(value, int):
        message.int64_param = value
    elif isinstance(value, float):
        message.double_param = value
    else:
        message.string_param = str(value)


def stream_error(message: str, request_id: str) -> bytes:
    """The bytes of a ModelStreamInferResponse with an error."""
    inner = pb.ModelInferResponse(id=request_id)
    encoded: bytes = pb.ModelStreamInferResponse(error_message=message, infer_response=inner).SerializeToString()
    return encoded


def _raw_text(text: str) -> bytes:
    """raw_output_contents of one BYTES tensor with one element: the field's length, the element's length (u32), the text."""
    raw = text.encode()
    return b"".join((_RAW_OUTPUT, varint(len(raw) + 4), len(raw).to_bytes(4, "little"), raw))


def varint(value: int) -> bytes:
    """A number as protobuf encodes lengths: 7 bits per byte, the lowest first."""
    if value <= 0x7F:
        return _ONE_BYTE_VARINTS[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
