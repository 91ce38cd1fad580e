"""Inconsistent requests and disconnecting clients: the right error or a clean end, without leaking requests, tasks or descriptors."""

from __future__ import annotations

import gzip
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as tgrpc
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_clients import PROMPT, Stream, tensors, text
from triton_server import TEXT, RunningServer, endless, running, until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from stoker.base.errors import RequestError
from stoker.frontend.tokenizer import Tokenizer
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models
from stoker.server.protocols.kserve.tensors import word_lists

MAX_BYTES = 1 << 16
NUM_DISCONNECTING = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(options=TritonOptions(models=default_models(), unary=True), max_request_bytes=MAX_BYTES) as running_server:
        yield running_server


def post(server: RunningServer, body: bytes, model: str = "ensemble", **headers: str) -> tuple[int, str]:
    answer = httpx.post(f"http://{server.http}/v2/models/{model}/infer", content=body, headers=headers, timeout=20)
    return answer.status_code, answer.json().get("error", "")


def binary(raw: bytes, size: int | None = None, *, header: int | None = None, shape: Any = (1, 1)) -> tuple[bytes, dict[str, str]]:
    """(infer body, headers). text_input is `raw`, with the declared size `size`."""
    message = {
        "inputs": [
            {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [3]},
            {
                "name": "text_input",
                "shape": shape,
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(raw) if size is None else size},
            },
        ]
    }
    text = json.dumps(message).encode()
    return text + raw, {"inference-header-content-length": str(len(text) if header is None else header)}


VALID = struct.pack("<I", 2) + b"hi"


@pytest.mark.parametrize(
    ("raw", "changes", "error"),
    [
        (b"\x02\x00", {}, "incomplete string length indicator for inference input 'text_input', expecting 4 bytes but only 2"),
        (struct.pack("<I", 1 << 31) + b"hi", {}, "expecting string of length 2147483648 but only 2 bytes available"),
        (VALID + VALID, {}, "unexpected number of string elements 2 for inference input 'text_input', expecting 1"),
        (b"", {}, "unexpected number of string elements 0"),
        (VALID, {"size": 1 << 40}, "expecting 1099511627776 bytes but only 6 bytes are left"),
        (VALID, {"size": -1}, "binary_data_size"),
        (VALID, {"size": 5}, "expecting string of length 2 but only 1 bytes available"),
        (VALID + b"more", {"size": 6}, "4 bytes belong to no input"),
        (VALID, {"header": 1 << 30}, "Unable to parse Inference-Header-Content-Length"),
        (VALID, {"header": 5}, "failed to parse the request JSON buffer"),
        (VALID, {"shape": [1 << 40, 1 << 40]}, "elements"),
        (VALID, {"shape": [-1, 1]}, "invalid shape for input text_input"),
        (VALID, {"shape": [[1]]}, "invalid shape for input text_input"),
        (VALID, {"shape": [1] * 100}, "invalid shape for input text_input"),
        (struct.pack("<I", 2) + b"\xff\xff", {}, "input 'text_input' is not UTF-8 at byte 0"),
    ],
)
def test_inconsistent_binary_tensors(server: RunningServer, raw: bytes, changes: dict[str, Any], error: str) -> None:
    body, headers = binary(raw, **changes)
    status, message = post(server, body, **headers)
    assert status in (400, 500) and error in message
    assert post(server, *[binary(VALID)[0]], **binary(VALID)[1])[0] == 200


def test_bodies_that_are_too_large_damaged_or_wrongly_compressed(server: RunningServer) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v2/models/ensemble/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    bomb = gzip.compress(b"[" * (MAX_BYTES * 50))
    assert len(bomb) < MAX_BYTES and post(server, bomb, **{"content-encoding": "gzip"})[0] == 413
    assert "is not gzip data" in post(server, b"nonsense", **{"content-encoding": "gzip"})[1]
    assert "ends in the middle of its gzip data" in post(server, gzip.compress(b"{}" * 100)[:-9], **{"content-encoding": "gzip"})[1]
    assert post(server, b"{}", **{"content-encoding": "br"})[0] == 415


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["a", "b"]]}], "Shape does not match"),
        ([{"name": "text_input", "shape": [1, 1], "datatype": "BYTES"}], "'data'"),
        ([{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": "a"}], "non-array as array"),
        ([{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}] * 2, "already exists"),
        ([{"shape": [1, 1], "datatype": "BYTES", "data": ["a"]}], "'name'"),
        ([1], "'inputs'"),
        ([{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"], "parameters": {"shared_memory_region": "x"}}],
         "Unable to find shared memory region: 'x'"),
    ],
)  # fmt: skip
def test_inconsistent_json_tensors(server: RunningServer, inputs: Any, error: str) -> None:
    status, message = post(server, json.dumps({"inputs": inputs}).encode())
    assert status in (400, 500) and error in message


def test_deep_and_wide_json(server: RunningServer) -> None:
    for body in (b"[" * 60_000, b'{"inputs":' * 5_000, json.dumps({"inputs": [], "parameters": {"a": {}}}).encode()):
        assert post(server, body)[0] in (400, 500)
    nested: Any = "a"
    for _ in range(40):
        nested = [nested]
    item = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": nested}
    assert "nested deeper" in post(server, json.dumps({"inputs": [item]}).encode())[1]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelMetadata", "RepositoryIndex", "SystemSharedMemoryStatus"])
def test_malformed_protobuf(server: RunningServer, method: str) -> None:
    import grpc

    with grpc.insecure_channel(server.grpc) as channel:
        path = f"/inference.GRPCInferenceService/{method}"
        with pytest.raises(grpc.RpcError) as found:
            if method == "ModelStreamInfer":
                next(channel.stream_stream(path)(iter([b"\xff\xff\xff"])))
            else:
                channel.unary_unary(path)(b"\xff\xff\xff", timeout=20)
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    details = found.value.details()  # type: ignore[attr-defined]
    name = method.replace("Stream", "")
    assert details == f"the 3 bytes of the request are not a valid inference.{name}Request message"


def test_a_unary_call_of_a_streamed_answer(server: RunningServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 5, "stream": True}
    client = tgrpc.InferenceServerClient(server.grpc)
    with pytest.raises(InferenceServerException, match=r"several responses.*ModelStreamInfer") as found:
        client.infer("ensemble", tensors(tgrpc, **inputs))
    assert found.value.status() == "StatusCode.INVALID_ARGUMENT"
    client.close()


def raw_request(**changes: Any) -> Any:
    request = pb.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.extend(changes.get("raw", [VALID, struct.pack("<i", 3)]))
    return request


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ([VALID], "expected raw_input_contents to be 2"),
        ([VALID, b"\x01"], "input byte size mismatch for input 'max_tokens' for model 'ensemble'. Expected 4, got 1"),
        ([b"\x09\0\0\0hi", struct.pack("<i", 3)], "expecting string of length 9 but only 2 bytes available"),
        ([], "input byte size mismatch for input 'text_input'"),
    ],
)
def test_inconsistent_grpc_messages(server: RunningServer, raw: list[bytes], error: str) -> None:
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(raw_request()).outputs
        with pytest.raises(grpc.RpcError) as found:
            stub.ModelInfer(raw_request(raw=raw))
        assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT and error in found.value.details()  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as found:
            stub.ModelInfer(raw_request(raw=[b"\0" * (2 * MAX_BYTES), b""]))
        assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"beam_width": 2}, "beam_width=2 is refused: max_beam_width is 1"),
        ({"stop_words_list": np.array([[[5, 6], [9, -1]]], np.int32)}, "offsets must increase and lie in 1 to 2"),
        ({"stop_words_list": np.array([[[5, 6], [2, 1]]], np.int32)}, "offsets must increase"),
        ({"bad_words_list": np.array([[[5, 6], [0, -1]]], np.int32)}, "offsets must increase"),
        ({"bad_words_list": np.array([[[5, 6], [-1, 2]]], np.int32)}, "after the first -1"),
        ({"bad_words_list": np.array([[[9999, 6], [1, -1]]], np.int32)}, "a token id is a whole number from 0 to 511"),
        ({"embedding_bias": np.zeros((1, 513), np.float32)}, "the vocabulary has 512 tokens"),
        ({"input_lengths": 9}, "the row has 3 input_ids"),
        ({"input_lengths": -1}, "the row has 3 input_ids"),
        ({"request_output_len": 0}, "max_tokens=0 is refused"),
        ({"input_ids": [5, 6, -2]}, "input_ids=-2 is refused: a token id is a whole number from 0"),
        ({"temperature": float("nan"), "runtime_top_k": 5}, "temperature"),
        ({"temperature": float("nan")}, "temperature=nan is refused"),
        ({"runtime_top_p": float("nan")}, "top_p=nan is refused"),
        ({"runtime_top_p": float("nan"), "runtime_top_k": 5}, "top_p=nan is refused"),
        ({"runtime_top_p_min": float("nan")}, "only 0 is supported"),
        ({"embedding_bias": np.array([[float("nan")]], np.float32)}, "logit_bias=nan is refused"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf is refused"),
        ({"runtime_top_p_decay": 0.5}, "only 1 is supported"),
        ({"lora_task_id": np.array([[0]], np.uint64)}, "there are no adapters"),
        ({"draft_input_ids": [1, 1 << 30]}, "prediction=1073741824 is refused"),
        ({"draft_input_ids": [5, 6], "draft_logits": np.zeros((1, 1, 512), np.float32)}, "so the shape must be [2, 512]"),
        ({"draft_input_ids": [5], "draft_logits": np.full((1, 1, 512), np.nan, np.float32)}, "draft token 0 has no finite largest logit"),
        ({"draft_acceptance_threshold": 0.5}, "a threshold would change what is generated"),
        ({"return_context_logits": True}, "return_context_logits=True is refused"),
    ],
)
def test_invalid_values_are_refused(server: RunningServer, values: dict[str, Any], error: str) -> None:
    client = tgrpc.InferenceServerClient(server.grpc)
    inputs = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 5} | values
    with pytest.raises(InferenceServerException) as found:
        client.infer("tensorrt_llm", tensors(tgrpc, **inputs))
    assert found.value.status() == "StatusCode.INVALID_ARGUMENT" and error in found.value.message()
    client.close()


def test_streaming_requires_a_decoupled_model() -> None:
    models = tuple(model if model.kind != "ensemble" else _coupled(model) for model in default_models())
    with running(options=TritonOptions(models=models)) as server, Stream(server) as stream:
        stream.send("ensemble", text_input=PROMPT, max_tokens=5, stream=True)
        with pytest.raises(InferenceServerException, match="Streaming is only supported if model is deployed using decoupled mode"):
            stream.next()
        stream.send("ensemble", text_input=PROMPT, max_tokens=100)
        assert text(stream.next()) == PROMPT + TEXT  # the stream is still usable


def _coupled(model: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(model, decoupled=False)


def test_disconnecting_clients_leak_nothing() -> None:
    """1,000 streams over HTTP and 20 over gRPC are abandoned. No sequence continues, and no task, id or descriptor is left."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": 200, "stream": True}).encode()
    request = b"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with running(endless, step_s=0.005) as server:
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as warm:
            warm.sendall(request)
            assert warm.recv(100)
        until(lambda: not server.executor.running)
        tasks, descriptors = server.num_tasks(), len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            clients = []
            for _ in range(NUM_DISCONNECTING // 10):
                clients.append(socket.create_connection((host, int(port))))
                clients[-1].sendall(request)
            clients[0].recv(1)
            for client in clients:
                client.close()
        streams = [Stream(server) for _ in range(20)]
        for i, stream in enumerate(streams):
            stream.send("tensorrt_llm", f"v{i}", input_ids=[5], input_lengths=1, request_output_len=200, streaming=True)
        streams[0].next()
        for stream in streams:
            stream.__exit__()
        until(lambda: not server.executor.running and not len(server.core.in_flight), 20)
        until(lambda: server.num_tasks() <= tasks and len(os.listdir("/proc/self/fd")) <= descriptors + 2, 20)


words_of_ids = st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=5).map(tuple), max_size=6)


@given(st.lists(words_of_ids, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_word_lists_are_unchanged_after_a_round_trip(rows: list[list[tuple[int, ...]]]) -> None:
    array = word_lists.write_word_lists(rows)
    assert array.shape[:2] == (len(rows), 2)
    assert [word_lists.read_word_list("w", row) for row in array] == rows


@given(st.lists(st.tuples(st.integers(-3, 12), st.integers(-3, 12)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_array_is_read_or_refused(pairs: list[tuple[int, int]]) -> None:
    array = np.array(pairs, np.int32).reshape(-1, 2).T
    try:
        words = word_lists.read_word_list("w", array)
    except RequestError:
        return
    assert [token for word in words for token in word] == [pair[0] for pair in pairs][: sum(map(len, words))] and all(words)


@pytest.mark.parametrize("words, message", [
    (["w"] * 1025, "there are 1025 words"),
    (["w" * 700] * 100, "have 70000 characters"),
    (["w"] * 8193, "a BYTES tensor has 8193 strings, and the limit is 8192"),
])  # fmt: skip
def test_too_many_words(words: list[str], message: str) -> None:
    """Without a limit, 200,000 words were tokenized for 13 s, during which no other request was answered."""
    with running() as server:
        for inputs in ({"bad_words": words}, {"embedding_bias_words": words, "embedding_bias_weights": [1.0] * len(words)}):
            body = {"text_input": "hi", "max_tokens": 3, **inputs}
            answer = httpx.post(f"http://{server.http}/v2/models/ensemble/generate", json=body, timeout=20)
            assert answer.status_code in (400, 500) and message in answer.json()["error"], answer.text


def test_a_long_tokenization_does_not_block_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenization ends only after another request has been answered: a blocked event loop would never answer it."""
    is_tokenizing, is_answered = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def waiting_encode(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        is_tokenizing.set()
        assert is_answered.wait(30), "no other request was answered during the tokenization"
        return encode(self, *args, **kwargs)

    with running() as server, ThreadPoolExecutor(1) as pool:
        url = f"http://{server.http}"
        monkeypatch.setattr(Tokenizer, "encode", waiting_encode)
        body = {"QUERY": "brown fox", "REQUEST_OUTPUT_LEN": 3}
        tokenization = pool.submit(httpx.post, f"{url}/v2/models/preprocessing/generate", json=body, timeout=60)
        assert is_tokenizing.wait(30)
        for _ in range(10):
            assert httpx.get(f"{url}/health/live", timeout=20).status_code == 200
        is_answered.set()
        assert tokenization.result(30).status_code == 200


def test_numbers_with_too_many_digits(server: RunningServer) -> None:
    for path in ("generate", "generate_stream", "infer"):
        answer = httpx.post(f"http://{server.http}/v2/models/ensemble/{path}", content=b'{"max_tokens": ' + b"9" * 5000 + b"}")
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("failed to parse the request JSON buffer: Number too big to be stored in double. at ")


def test_bodies_may_be_longer_than_grpc_s_messages() -> None:
    with running(max_request_bytes=1 << 32) as server, tgrpc.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()
