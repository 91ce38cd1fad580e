"""Random requests over gRPC and HTTP. Each is answered or refused, none makes the server fail, and none leaves a request in flight."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from triton_server import RunningServer, running, until
from tritonclient.grpc import service_pb2 as pb

from stoker.server.protocols.kserve.grpc.messages import CONTENTS
from stoker.server.protocols.kserve.model_config import TensorRow, tensors
from stoker.server.protocols.kserve.tensors.dtypes import DTYPES, kserve_name

FAILED = "The server failed on this request"
REQUIRED = {
    "ensemble": ("text_input", "max_tokens"),
    "tensorrt_llm_bls": ("text_input", "max_tokens"),
    "tensorrt_llm": ("input_ids", "input_lengths", "request_output_len"),
    "preprocessing": ("QUERY", "REQUEST_OUTPUT_LEN"),
    "postprocessing": ("TOKENS_BATCH", "SEQUENCE_LENGTH"),
}
NUMBERS = {"f": (0.0, 1.0, -1.0, 0.5, 1e30, math.nan, math.inf, -math.inf), "b": (False, True), "i": (0, 1, -1, 5, 127), "u": (0, 1, 7)}
TEXTS = (b"", b"hi", b"\xff\xfe", b"x" * 500, "é".encode())
DIMS = (1, 1, 1, 2, 0, 3, 1 << 31)
HUGE = (-1, 0, 1, 2, 1 << 40)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as running_server:
        yield running_server
        until(lambda: not running_server.executor.running and not len(running_server.core.in_flight))


class RequestGenerator(random.Random):
    """Random requests, reproducible by seed."""

    def request(self, kind: str) -> dict[str, Any]:
        """A request with the structure of its JSON. The values of BYTES tensors are bytes."""
        declared = {tensor.name: tensor for tensor in tensors(kind)[0]}
        names = [
            *(REQUIRED[kind] if self.usually() else ()),
            *self.sample(list(declared), min(len(declared), self.choice((0, 0, 1, 2, 4)))),
        ]
        rows = self.choice((1,) * 8 + (0, 2, 3))
        outputs = [tensor.name for tensor in tensors(kind)[1]]
        return {
            "id": self.choice(("", "", "a", "x" * 300, "é")),
            "inputs": [self.input(declared[name], rows) for name in dict.fromkeys(names)],
            "outputs": [{"name": self.choice([*outputs, "none"])} for _ in range(self.choice((0, 0, 1, 2)))],
            "parameters": {self.choice(("priority", "timeout", "x")): self.choice((-1, 0, 1, 1 << 62, True, "a")) for _ in range(2)},
        }

    def usually(self) -> bool:
        return self.random() < 0.95

    def input(self, tensor: TensorRow, rows: int) -> dict[str, Any]:
        dtype = kserve_name(tensor.dtype) if self.usually() else self.choice([*DTYPES, "NONE"])
        shape = [rows, *(self.choice(DIMS) if dim == -1 else dim for dim in tensor.dims)]
        if not self.usually():
            shape = [self.choice(HUGE) for _ in range(self.randint(0, 18))]
        size = math.prod(shape)
        count = (size if 0 <= size < 5000 else 1) + (not self.usually())
        ordinary = self.random() < 0.8
        return {"name": tensor.name, "datatype": dtype, "shape": shape, "data": [self.value(dtype, ordinary) for _ in range(count)]}

    def value(self, dtype: str, ordinary: bool) -> Any:
        kind = DTYPES[dtype].kind if dtype in DTYPES else "i"
        if kind == "O":
            return b"hi" if ordinary else self.choice(TEXTS)
        return type(NUMBERS[kind][0])(1) if ordinary else self.choice(NUMBERS[kind])


def as_grpc(kind: str, body: dict[str, Any], generator: RequestGenerator) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=kind, id=body["id"])
    for item in body["inputs"]:
        tensor = request.inputs.add(name=item["name"], datatype=item["datatype"], shape=item["shape"])
        if item["datatype"] in CONTENTS:
            getattr(tensor.contents, CONTENTS[item["datatype"]]).extend(item["data"])
        if not generator.usually():
            request.raw_input_contents.append(generator.randbytes(generator.randint(0, 20)))
    for output in body["outputs"]:
        request.outputs.add(name=output["name"])
    for name, value in body["parameters"].items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


@pytest.mark.parametrize("kind", REQUIRED)
def test_grpc(server: RunningServer, kind: str) -> None:
    generator, answered = RequestGenerator(kind), 0
    with grpc.insecure_channel(server.grpc) as channel:
        unary = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        for _ in range(400):
            request = as_grpc(kind, generator.request(kind), generator)
            try:
                unary(request, timeout=20)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and FAILED not in error.details(), (error.details(), request)
            else:
                answered += 1
    assert answered > 5


@pytest.mark.parametrize("kind", REQUIRED)
def test_http(server: RunningServer, kind: str) -> None:
    generator, answered = RequestGenerator(kind), 0
    with httpx.Client(base_url=f"http://{server.http}", timeout=20) as client:
        for _ in range(400):
            body = json.dumps(generator.request(kind), default=lambda value: value.decode("utf-8", "replace"))
            answer = client.post(f"/v2/models/{kind}/infer", content=body)
            assert FAILED not in answer.text and answer.status_code in (200, 400, 500), (answer.text, body)
            answered += answer.status_code == 200
    assert answered > 5


@pytest.mark.parametrize("name, datatype", [("text_output", "BYTES"), ("cum_log_probs", "FP32")])
@pytest.mark.parametrize("rows, n", [(3, 1), (1, 2), (2, 2)])
def test_one_output_of_several_rows(server: RunningServer, name: str, datatype: str, rows: int, n: int) -> None:
    body = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [rows, 1], "data": [f"row {i}" for i in range(rows)]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [rows, 1], "data": [3] * rows},
            {"name": "num_return_sequences", "datatype": "INT32", "shape": [rows, 1], "data": [n] * rows},
        ],
        "outputs": [{"name": name}],
    }
    answer = httpx.post(f"http://{server.http}/v2/models/ensemble/infer", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    shape = [rows * n] if name == "text_output" else [rows, n]
    assert (output["name"], output["datatype"], output["shape"]) == (name, datatype, shape)
    if name == "text_output":
        assert all(f"row {i // n}" in text for i, text in enumerate(output["data"]))


def test_a_streaming_row_has_more_than_one_response(server: RunningServer) -> None:
    """The parts of a stream are not combined like sequences of a row."""
    body = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "b"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [2, 1], "data": [3, 3]},
            {"name": "stream", "datatype": "BOOL", "shape": [2, 1], "data": [False, True]},
        ]
    }
    answer = httpx.post(f"http://{server.http}/v2/models/ensemble/infer", json=body, timeout=20)
    assert answer.status_code == 400 and "has several responses to this request" in answer.json()["error"], answer.text
