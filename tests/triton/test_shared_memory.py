"""The requests of tritonclient's examples against the test models, and shared memory with tritonclient's own functions."""

from __future__ import annotations

import base64
import ctypes
import os
import queue
import re
import struct
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as tgrpc
import tritonclient.http as thttp
import tritonclient.utils as tutils
import tritonclient.utils.shared_memory as tshm
from test_triton_clients import tensors
from triton_server import RunningServer, running
from tritonclient.utils import InferenceServerException

from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models
from stoker.server.protocols.kserve.shared_memory import cuda

MAX_BYTES = 1 << 16
PREFIX = f"/stoker_{uuid.uuid4().hex[:8]}_"

EXAMPLES = pytest.mark.compatibility(
    protocol="Triton",
    client="tritonclient",
    feature="requests of its examples: simple, simple_string, simple_identity, repeat_int32, sequences, mock_llm",
)
MEMORY = pytest.mark.compatibility(
    protocol="Triton", client="tritonclient", feature="system shared memory over HTTP and gRPC, with tritonclient.utils.shared_memory"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = TritonOptions(models=default_models(), unary=True)
    allowed = (f"{PREFIX}*", "cuda:0")
    with running(options=options, test_models=True, shared_memory=allowed, max_request_bytes=MAX_BYTES) as running_server:
        yield running_server


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[tuple[Any, Any]]:
    """(client, its module)."""
    module = thttp if request.param == "http" else tgrpc
    connected = module.InferenceServerClient(server.http if request.param == "http" else server.grpc)
    yield connected, module
    connected.unregister_system_shared_memory()
    connected.close()


Create = Callable[[str, int], Any]


@pytest.fixture
def create() -> Iterator[Create]:
    """Creates regions with tritonclient; they are destroyed at the end."""
    handles = []

    def create_region(name: str, size: int) -> Any:
        handles.append(tshm.create_shared_memory_region(name, PREFIX + name, size))
        return handles[-1]

    yield create_region
    for handle in handles:
        tshm.destroy_shared_memory_region(handle)


def pair(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(16, dtype=dtype)[None], np.ones((1, 16), dtype)


def strings(array: np.ndarray) -> np.ndarray:
    return np.array([str(item).encode() for item in array.flat], object).reshape(array.shape)


@EXAMPLES
@pytest.mark.parametrize(("model", "dtype"), [("simple", np.int32), ("simple_int8", np.int8), ("simple_string", object)])
def test_sums_and_differences(client: tuple[Any, Any], model: str, dtype: Any) -> None:
    connected, module = client
    left, right = pair(np.int32 if dtype is object else dtype)
    results = {"OUTPUT0": left + right, "OUTPUT1": left - right}
    if dtype is object:
        left, right, results = strings(left), strings(right), {name: strings(array) for name, array in results.items()}
    result = connected.infer(model, tensors(module, INPUT0=left, INPUT1=right))
    for name, expected in results.items():
        np.testing.assert_array_equal(result.as_numpy(name), expected)
    only = connected.infer(model, tensors(module, INPUT0=left, INPUT1=right), outputs=[module.InferRequestedOutput("OUTPUT1")])
    assert only.as_numpy("OUTPUT0") is None
    np.testing.assert_array_equal(only.as_numpy("OUTPUT1"), results["OUTPUT1"])


@EXAMPLES
def test_identity_and_wrong_strings(client: tuple[Any, Any]) -> None:
    connected, module = client
    words = np.array([[b"a", b"\xff\x00", "é".encode()]], object)
    np.testing.assert_array_equal(connected.infer("simple_identity", tensors(module, INPUT0=words)).as_numpy("OUTPUT0"), words)
    with pytest.raises(InferenceServerException, match="each element must be a whole number of 64 bits"):
        connected.infer("simple_string", tensors(module, INPUT0=np.full((1, 16), b"x", object), INPUT1=np.full((1, 16), b"1", object)))


@EXAMPLES
def test_explicit_contents_over_grpc(server: RunningServer) -> None:
    """The request of grpc_explicit_int_content_client.py: the values are in `contents`."""
    from tritonclient.grpc import service_pb2 as pb

    left, right = pair(np.int32)
    request = pb.ModelInferRequest(model_name="simple")
    for name, array in (("INPUT0", left), ("INPUT1", right)):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16]).contents.int_contents[:] = array.flat
    import grpc

    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        response = infer(request)
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], np.int32), (left + right)[0])


@EXAMPLES
def test_a_decoupled_model_repeats_its_input(server: RunningServer) -> None:
    results: queue.Queue[Any] = queue.Queue()
    values = np.arange(100, 110, dtype=np.int32)
    with tgrpc.InferenceServerClient(server.grpc) as connected:
        connected.start_stream(lambda result, error: results.put(error or result))
        inputs = tensors(tgrpc, IN=values, DELAY=np.ones(10, np.uint32), WAIT=np.ones(1, np.uint32))
        connected.async_stream_infer("repeat_int32", inputs, outputs=[tgrpc.InferRequestedOutput("OUT")])
        received = [results.get(timeout=10).as_numpy("OUT") for _ in values]
        np.testing.assert_array_equal(np.concatenate(received), values)
        wrong = tensors(tgrpc, IN=values, DELAY=np.ones(2, np.uint32), WAIT=np.ones(1, np.uint32))
        connected.async_stream_infer("repeat_int32", wrong)
        assert "expected IN and DELAY shape to match" in str(results.get(timeout=10))


VALUES = [11, 7, 5, 3, 2, 0, 1]


@EXAMPLES
@pytest.mark.parametrize("dynamic", [False, True])
def test_sequences_over_http_and_over_a_stream(server: RunningServer, dynamic: bool) -> None:
    """The requests and results of simple_http_sequence_sync_infer_client.py and simple_grpc_sequence_stream_infer_client.py."""
    numbers = "simple_dyna_sequence" if dynamic else "simple_sequence"
    texts = "simple_string_dyna_sequence" if dynamic else "simple_sequence"
    negative = [-value for value in VALUES]
    cases = [
        (numbers, 1000, [0, *VALUES]),
        (numbers, 1001, [100, *negative]),
        (texts, "1002" if dynamic else uuid.uuid4().hex, [20, *negative]),
    ]
    for model, sequence_id, sent in cases:
        if model == "simple_string_dyna_sequence":
            expected = list(np.cumsum(sent))
        else:
            expected = [sent[0] + 1, *sent[1:]]
        if dynamic:
            expected[-1] += int(sequence_id)
        http, results = thttp.InferenceServerClient(server.http), queue.Queue()
        stream = tgrpc.InferenceServerClient(server.grpc)
        stream.start_stream(lambda result, error, results=results: results.put(error or result))
        received = []
        for i, value in enumerate(sent):
            options = {"sequence_id": sequence_id, "sequence_start": i == 0, "sequence_end": i == len(sent) - 1}
            tensor = np.array([[value]], np.int32)
            received.append(http.infer(model, tensors(thttp, INPUT=tensor), **options).as_numpy("OUTPUT").item())
        for i, value in enumerate(sent):  # all at once; a second sequence with the same id
            options = {"sequence_id": sequence_id, "sequence_start": i == 0, "sequence_end": i == len(sent) - 1}
            stream.async_stream_infer(model, tensors(tgrpc, INPUT=np.array([[value]], np.int32)), **options)
        assert received == expected
        assert [results.get(timeout=10).as_numpy("OUTPUT").item() for _ in sent] == expected
        stream.stop_stream()
        with pytest.raises(InferenceServerException, match="must specify the START flag on the first request"):
            http.infer(model, tensors(thttp, INPUT=np.array([[1]], np.int32)), sequence_id=sequence_id)
        http.close()
        stream.close()


def test_a_request_without_a_sequence_is_rejected(server: RunningServer) -> None:
    with tgrpc.InferenceServerClient(server.grpc) as connected:
        with pytest.raises(InferenceServerException, match="must specify a non-zero or non-empty correlation ID"):
            connected.infer("simple_sequence", tensors(tgrpc, INPUT=np.array([[1]], np.int32)))
        with pytest.raises(InferenceServerException, match="must be a whole number for this model"):
            inputs = tensors(tgrpc, INPUT=np.array([[1]], np.int32))
            connected.infer("simple_dyna_sequence", inputs, sequence_id="x", sequence_start=True, sequence_end=True)


@EXAMPLES
def test_mock_llm_over_the_generate_endpoints(server: RunningServer) -> None:
    """The cases of Triton's generate_endpoint_test.py."""
    base = f"http://{server.http}/v2/models/mock_llm"

    def generate(**body: Any) -> httpx.Response:
        return httpx.post(f"{base}/generate", json=body)

    def events(**body: Any) -> tuple[int, list[Any]]:
        response = httpx.post(f"{base}/generate_stream", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.status_code, re.findall(r'"(?:TEXT|error)":"([^"]*)"', response.text)

    text = "hello world"
    assert generate(PROMPT=text, STREAM=False).json()["TEXT"] == text
    assert events(PROMPT=[text], STREAM=True, REPETITION=3) == (200, [text] * 3)
    assert events(PROMPT=[text], STREAM=True, parameters={"REPETITION": 3}) == (200, [text] * 3)
    assert events(PROMPT=[text], STREAM=True, REPETITION=0, FAIL_LAST=True) == (400, ["An Error Occurred"])
    assert events(PROMPT=[text], STREAM=True, REPETITION=1, FAIL_LAST=True) == (200, [text, "An Error Occurred"])
    assert generate(PROMPT=text, STREAM=True).json()["TEXT"] == text
    for body, error in [
        ({}, "expected 2 inputs but got 0"),
        ({"PROMPT": "hello"}, "expected 2 inputs but got 1"),
        ({"PROMPT": 123, "STREAM": False}, "attempt to access JSON non-string as string"),
        ({"STREAM": 123, "PROMPT": True}, "attempt to access JSON non-boolean as boolean"),
        ({"PROMPT": text, "STREAM": True, "REPETITION": 0}, "generate expects model to produce exactly 1 response"),
        ({"PROMPT": text, "STREAM": True, "REPETITION": 2}, "generate expects model to produce exactly 1 response"),
        ({"PROMPT": text, "STREAM": True, "PARAMS": {"A": 0}}, "parameter 'PARAMS' has invalid type"),
    ]:
        assert error in generate(**body).json()["error"], body


@MEMORY
def test_inputs_and_outputs_in_shared_memory(client: tuple[Any, Any], create: Create) -> None:
    """The requests of simple_{http,grpc}_shm_client.py, with both inputs in one region."""
    connected, module = client
    left, right = pair(np.int32)
    size = left.nbytes
    source, target = create("input", 2 * size), create("output", 2 * size)
    tshm.set_shared_memory_region(source, [left])
    tshm.set_shared_memory_region(source, [right], offset=size)
    for name in ("input", "output"):
        connected.register_system_shared_memory(name, PREFIX + name, 2 * size)
    inputs, outputs = [], []
    for i in range(2):
        inputs.append(module.InferInput(f"INPUT{i}", [1, 16], "INT32"))
        inputs[-1].set_shared_memory("input", size, offset=i * size)
        outputs.append(module.InferRequestedOutput(f"OUTPUT{i}"))
        outputs[-1].set_shared_memory("output", size, offset=i * size)
    result = connected.infer("simple", inputs, outputs=outputs)
    sent = result.get_output("OUTPUT0").get("data") if module is thttp else result.get_response().raw_output_contents[0]
    assert not sent, "the response has no data"
    np.testing.assert_array_equal(tshm.get_contents_as_numpy(target, np.int32, [1, 16]), left + right)
    np.testing.assert_array_equal(tshm.get_contents_as_numpy(target, np.int32, [1, 16], offset=size), left - right)
    inline = tensors(module, INPUT1=right)  # one input in the request, one output in the response
    result = connected.infer("simple", [inputs[0], *inline], outputs=[outputs[0], module.InferRequestedOutput("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), left - right)
    status = connected.get_system_shared_memory_status()
    regions = {row["name"]: row for row in status} if isinstance(status, list) else dict(status.regions)
    assert set(regions) == {"input", "output"}
    connected.unregister_system_shared_memory("input")
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'input'"):
        connected.infer("simple", inputs, outputs=outputs)


@MEMORY
def test_strings_and_a_generated_text_in_shared_memory(client: tuple[Any, Any], create: Create) -> None:
    """As simple_{http,grpc}_shm_string_client.py; and the ensemble's prompt and text."""
    connected, module = client
    prompt = tutils.serialize_byte_tensor(np.array([[b"The dog"]], object))
    size = tutils.serialized_byte_size(prompt)
    source, target = create("prompt", size), create("text", 4096)
    tshm.set_shared_memory_region(source, [prompt])
    connected.register_system_shared_memory("prompt", PREFIX + "prompt", size)
    connected.register_system_shared_memory("text", PREFIX + "text", 2048, offset=2048)
    text_input = module.InferInput("text_input", [1, 1], "BYTES")
    text_input.set_shared_memory("prompt", size)
    output = module.InferRequestedOutput("text_output")
    output.set_shared_memory("text", 2000, offset=48)
    result = connected.infer("ensemble", [text_input, *tensors(module, max_tokens=30)], outputs=[output])
    shape = result.get_output("text_output")["shape"] if module is thttp else list(result.get_output("text_output").shape)
    written = tshm.get_contents_as_numpy(target, np.object_, shape, offset=2048 + 48)
    whole = connected.infer("ensemble", tensors(module, text_input="The dog", max_tokens=30)).as_numpy("text_output")
    assert [item if isinstance(item, bytes) else item.encode() for item in whole.flat] == list(written.flat)


@MEMORY
def test_a_stream_writes_each_response(server: RunningServer, create: Create) -> None:
    target = create("stream", 4)
    results: queue.Queue[Any] = queue.Queue()
    with tgrpc.InferenceServerClient(server.grpc) as connected:
        connected.register_system_shared_memory("stream", PREFIX + "stream", 4)
        connected.start_stream(lambda result, error: results.put(error or result))
        output = tgrpc.InferRequestedOutput("OUT")
        output.set_shared_memory("stream", 4)
        inputs = tensors(tgrpc, IN=np.array([7], np.int32), DELAY=np.zeros(1, np.uint32), WAIT=np.zeros(1, np.uint32))
        connected.async_stream_infer("repeat_int32", inputs, outputs=[output])
        assert results.get(timeout=10).get_output("OUT").parameters["shared_memory_byte_size"].int64_param == 4
        assert tshm.get_contents_as_numpy(target, np.int32, [1]).item() == 7
        connected.unregister_system_shared_memory()


def test_regions_that_are_rejected(client: tuple[Any, Any], create: Create) -> None:
    connected, _ = client
    create("small", 64)
    connected.register_system_shared_memory("small", PREFIX + "small", 64)
    for name, key, size, offset, error in [
        (
            "other",
            "/psm_of_another_program",
            64,
            0,
            "does not allow the shared memory '/psm_of_another_program'. Start it with --shared-memory",
        ),
        ("other", "/../etc/passwd", 64, 0, "a key is a slash and a name without slashes"),
        ("other", PREFIX + "missing", 64, 0, "Unable to open shared memory region"),
        ("other", PREFIX + "small", 65, 0, "beyond the end of"),
        ("other", PREFIX + "small", 1, 64, "beyond the end of"),
        ("other", PREFIX + "small", 0, 0, "byte_size of shared memory region 'other' is 0"),
        ("other", PREFIX + "triton_python_backend_shm_region_1", 8, 0, "contains the reserved prefix"),
        ("small", PREFIX + "small", 64, 0, "shared memory region 'small' already in manager"),
        ("n" * 300, PREFIX + "small", 64, 0, "has a name of 1 to 256 characters"),
    ]:
        with pytest.raises(InferenceServerException, match=re.escape(error)):
            connected.register_system_shared_memory(name, key, size, offset)
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'nope'"):
        connected.get_system_shared_memory_status("nope")


def test_ranges_and_sizes_that_are_rejected(client: tuple[Any, Any], create: Create) -> None:
    connected, module = client
    create("range", 64)
    large = create("large", 2 * MAX_BYTES)
    connected.register_system_shared_memory("range", PREFIX + "range", 64)
    connected.register_system_shared_memory("large", PREFIX + "large", 2 * MAX_BYTES)

    def infer(region: str, size: int, offset: int = 0, output_size: int = 64) -> None:
        left = module.InferInput("INPUT0", [1, 16], "INT32")
        left.set_shared_memory(region, size, offset)
        output = module.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("large", output_size)
        connected.infer("simple", [left, *tensors(module, INPUT1=pair(np.int32)[1])], outputs=[output])

    infer("range", 64)
    for arguments, error in [
        (("range", 65), "Invalid offset + byte size for shared memory region: 'range'"),
        (("range", 64, 1), "Invalid offset + byte size for shared memory region: 'range'"),
        (("range", 32), "input byte size mismatch for input 'INPUT0'"),
        (("large", MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes, and max_request_bytes is {MAX_BYTES}"),
        (("range", 64, 0, 8), "(8 bytes) should be at least 64 bytes to hold the results"),
    ]:
        with pytest.raises(InferenceServerException, match=re.escape(error)):
            infer(*arguments)
    assert large is not None
    os.truncate(Path("/dev/shm") / f"{PREFIX}range"[1:], 16)  # a client may truncate the object at any time
    with pytest.raises(InferenceServerException, match="has become smaller than 64 bytes"):
        infer("range", 64)
    os.truncate(Path("/dev/shm") / f"{PREFIX}large"[1:], 0)
    os.truncate(Path("/dev/shm") / f"{PREFIX}range"[1:], 64)
    with pytest.raises(InferenceServerException, match="has become smaller than"):
        infer("range", 64)
    assert (Path("/dev/shm") / f"{PREFIX}large"[1:]).stat().st_size == 0, "the server does not extend the object"


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_cuda_shared_memory_without_a_gpu(server: RunningServer) -> None:
    http = f"http://{server.http}/v2/cudasharedmemory"
    handle = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 64}
    for change, error in [
        ({"raw_handle": {"b64": "?"}}, "'b64' is not base64"),
        ({"raw_handle": {"b64": "AAAA"}}, "a handle has 64 bytes"),
        ({"device_id": 1}, "does not allow the shared memory 'cuda:1'"),
        ({"byte_size": "64"}, "Unable to parse 'byte_size': it must be a whole number"),
        ({}, "CUDA shared memory needs a GPU, and this server's machine has no libcuda.so.1"),
    ]:
        response = httpx.post(f"{http}/region/r/register", json=handle | change)
        assert response.status_code == 400 and error in response.json()["error"], response.text
    assert httpx.get(f"{http}/status").json() == []


def test_without_the_option_no_region_is_allowed() -> None:
    with running(options=TritonOptions(models=default_models(), unary=True)) as closed:
        client = thttp.InferenceServerClient(closed.http)
        with pytest.raises(InferenceServerException, match="does not allow the shared memory '/x'"):
            client.register_system_shared_memory("x", "/x", 8)
        assert not client.is_model_ready("simple") and client.get_system_shared_memory_status() == []
        client.close()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A stand-in for the CUDA driver, whose device memory is host memory. It checks the calls and their arguments."""
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).parent / "cuda_driver.c"
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(cuda, "LIBRARY", str(library))
    cuda._driver.cache_clear()
    cuda._primary_context.cache_clear()
    loaded = ctypes.CDLL(str(library))
    loaded.allocate.restype = ctypes.c_uint64
    loaded.allocate.argtypes = [ctypes.c_uint64]
    yield loaded
    cuda._driver.cache_clear()
    cuda._primary_context.cache_clear()


def test_cuda_shared_memory(driver: ctypes.CDLL) -> None:
    """The requests of simple_http_cudashm_client.py. Regions are closed when they are unregistered and when the server ends."""
    left, right = pair(np.int32)
    address = driver.allocate(256)
    ctypes.memmove(address, left.tobytes() + right.tobytes(), 128)
    handle = struct.pack("<8sQQ40x", b"fakecuda", address, 256)
    options = TritonOptions(models=default_models(), unary=True)
    with running(options=options, test_models=True, shared_memory=("cuda:*",)) as started:
        client = thttp.InferenceServerClient(started.http)
        client.register_cuda_shared_memory("data", base64.b64encode(handle), 0, 256)
        inputs, outputs = [], []
        for i in range(2):
            inputs.append(thttp.InferInput(f"INPUT{i}", [1, 16], "INT32"))
            inputs[-1].set_shared_memory("data", 64, offset=64 * i)
            outputs.append(thttp.InferRequestedOutput(f"OUTPUT{i}"))
            outputs[-1].set_shared_memory("data", 64, offset=128 + 64 * i)
        client.infer("simple", inputs, outputs=outputs)
        results = np.frombuffer(ctypes.string_at(address + 128, 128), np.int32)
        np.testing.assert_array_equal(results, np.concatenate([left + right, left - right], axis=1)[0])
        assert client.get_cuda_shared_memory_status() == [{"name": "data", "device_id": 0, "byte_size": 256}]
        with tgrpc.InferenceServerClient(started.grpc) as grpc_client:
            assert dict(grpc_client.get_cuda_shared_memory_status().regions)["data"].byte_size == 256
            for raw, device, size, error in [
                (handle, 0, 257, "the allocation has 256 bytes, and byte_size is 257"),
                (b"x" * 64, 0, 8, "cuIpcOpenMemHandle_v2 returned CUDA_ERROR_INVALID_HANDLE"),
                (handle, 1, 8, "cuDeviceGet returned"),
            ]:
                with pytest.raises(InferenceServerException, match=re.escape(error)):
                    grpc_client.register_cuda_shared_memory("other", base64.b64encode(raw), device, size)
        assert driver.num_open() == 1
        client.unregister_cuda_shared_memory("data")
        assert driver.num_open() == 0
        client.register_cuda_shared_memory("data", base64.b64encode(handle), 0, 256)
        client.close()
        assert driver.num_open() == 1
    assert driver.num_open() == 0, "the end of the server closes it"
