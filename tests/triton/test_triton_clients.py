"""The real tritonclient over HTTP and gRPC: whole and streamed responses, binary and JSON tensors, each model separately."""

from __future__ import annotations

import asyncio
import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tgrpc
import tritonclient.grpc.aio as tgrpc_aio
import tritonclient.http as thttp
import tritonclient.http.aio as thttp_aio
from triton_server import TEXT, RunningServer, endless, running, tokenizer, until
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from stoker.server.protocols.kserve.model_config import KINDS, TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models

TENSORS = pytest.mark.compatibility(
    protocol="Triton",
    client="tritonclient",
    feature="inputs and outputs of ensemble, tensorrt_llm, preprocessing, postprocessing and tensorrt_llm_bls",
)
STREAMS = pytest.mark.compatibility(protocol="Triton", client="tritonclient", feature="gRPC: decoupled streams, stop tensor, cancellation")
UNARY = pytest.mark.compatibility(
    protocol="Triton", client="tritonclient", feature="gRPC: unary requests, asyncio clients, errors, API keys"
)
CONTROL = pytest.mark.compatibility(
    protocol="Triton", client="tritonclient", feature="health, metadata, statistics, metrics and model control"
)

PROMPT = "The dog"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(options=TritonOptions(models=default_models(), unary=True, max_beam_width=4)) as running_server:
        yield running_server


def tensors(client: Any, **values: Any) -> list[Any]:
    """Inputs of one row from scalars, lists of strings and arrays."""
    inputs = []
    for name, value in values.items():
        array = value if isinstance(value, np.ndarray) else np.array(value if isinstance(value, list) else [value])
        if array.dtype.kind == "U":
            array = np.array([item.encode() for item in array], object)
        dtypes = {"i": np.int32, "f": np.float32}
        array = array.astype(dtypes.get(array.dtype.kind, array.dtype)) if not isinstance(value, np.ndarray) else array
        array = array if isinstance(value, np.ndarray) else array[None]
        tensor = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def text(result: Any, name: str = "text_output") -> str:
    item = result.as_numpy(name).flat[0]  # JSON data has strings, binary data has bytes
    return item if isinstance(item, str) else item.decode()


class Stream:
    """A gRPC stream whose responses are read one at a time."""

    def __init__(self, server: RunningServer, headers: dict[str, str] | None = None) -> None:
        self.client = tgrpc.InferenceServerClient(server.grpc)
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self._responses.put((result, error)), headers=headers)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def send(self, model: str, request_id: str = "", *, empty_final: bool = False, options: Any = None, **values: Any) -> None:
        self.client.async_stream_infer(
            model,
            tensors(tgrpc, **values),
            request_id=request_id,
            enable_empty_final_response=empty_final,
            **(options or {}),
        )

    def next(self) -> Any:
        result, error = self._responses.get(timeout=10)
        if error is not None:
            raise error
        return result

    def rest(self) -> list[Any]:
        """Results up to and including the final one."""
        results = [self.next()]
        while not final(results[-1]):
            results.append(self.next())
        return results


def final(result: Any) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("kind", ["http", "grpc"])
@CONTROL
def test_metadata_and_control(server: RunningServer, kind: str) -> None:
    client = (thttp if kind == "http" else tgrpc).InferenceServerClient(getattr(server, kind))
    options = {} if kind == "http" else {"as_json": True}
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ensemble")
    assert client.get_server_metadata(**options)["name"] == "stoker"
    assert {name for name in KINDS if client.get_model_metadata(name, **options)["name"] == name} == set(KINDS)
    config = client.get_model_config("tensorrt_llm", **options)
    config = config.get("config", config)
    assert config["model_transaction_policy"]["decoupled"] and config["max_batch_size"] == 256
    index = client.get_model_repository_index(**options)
    assert {row["name"] for row in (index if kind == "http" else index["models"])} == {*KINDS, "tiny"}
    assert client.get_inference_statistics("tensorrt_llm", **options)["model_stats"][0]["name"] == "tensorrt_llm"
    log = client.update_log_settings({"log_verbose_level": 1}, **options)
    assert "log_verbose_level" in str(log)
    client.update_log_settings({"log_verbose_level": 0})
    assert "OFF" in str(client.get_trace_settings(**options))
    with pytest.raises(InferenceServerException, match="does not allow the shared memory '/a'"):
        client.register_system_shared_memory("a", "/a", 4)
    with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
        client.unload_model("ensemble")
    client.close()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.compatibility(protocol="Triton", client="tritonclient", feature="HTTP: binary and JSON tensors, gzip and deflate")
def test_http_infer(server: RunningServer, binary: bool, compression: str | None) -> None:
    client = thttp.InferenceServerClient(server.http)
    inputs = tensors(thttp, text_input=PROMPT, max_tokens=100)
    for tensor in inputs:
        if not binary:
            array = np.array([[PROMPT.encode()]], object) if tensor.name() == "text_input" else np.array([[100]], np.int32)
            tensor.set_data_from_numpy(array, binary_data=False)
    outputs = [
        thttp.InferRequestedOutput("text_output", binary_data=binary),
        thttp.InferRequestedOutput("cum_log_probs", binary_data=binary),
    ]
    result = client.infer(
        "ensemble",
        inputs,
        outputs=outputs,
        request_id="one",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert text(result) == PROMPT + TEXT and result.get_response()["id"] == "one"
    assert result.get_response()["parameters"] == {
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
        "finish_reason": "stop",
    }
    assert [o["name"] for o in result.get_response()["outputs"]] == ["cum_log_probs", "text_output"]
    client.close()


@UNARY
def test_grpc_infer_and_asyncio_clients(server: RunningServer) -> None:
    client = tgrpc.InferenceServerClient(server.grpc)
    assert text(client.infer("ensemble", tensors(tgrpc, text_input=PROMPT, max_tokens=100))) == PROMPT + TEXT
    client.close()

    async def both() -> tuple[str, str, list[str]]:
        async with tgrpc_aio.InferenceServerClient(server.grpc) as over_grpc, thttp_aio.InferenceServerClient(server.http) as over_http:
            first = await over_grpc.infer("tensorrt_llm_bls", tensors(tgrpc, text_input=PROMPT, max_tokens=100))
            second = await over_http.infer("tensorrt_llm_bls", tensors(thttp, text_input=PROMPT, max_tokens=100))

            async def requests() -> Any:
                yield {"model_name": "ensemble", "inputs": tensors(tgrpc, text_input=PROMPT, max_tokens=100, stream=True)}

            parts = []
            async for result, error in over_grpc.stream_infer(requests()):
                assert error is None
                parts.append(text(result))
            return text(first), text(second), parts

    first, second, parts = asyncio.run(both())
    assert first == second == PROMPT + TEXT and "".join(parts) == TEXT and len(parts) > 5


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@STREAMS
def test_joined_stream_equals_the_whole_text(server: RunningServer, model: str) -> None:
    with Stream(server) as stream:
        stream.send(model, "s1", text_input=PROMPT, max_tokens=100, stream=True)
        results = stream.rest()
    assert "".join(map(text, results)) == TEXT
    assert {result.get_response().id for result in results} == {"s1"} and sum(map(final, results)) == 1
    assert results[-1].get_response().parameters["finish_reason"].string_param == "stop"
    assert ("sequence_id" in results[0].get_response().parameters) == (model == "ensemble")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("values", [{}, {"return_log_probs": True}], ids=["text", "scores"])
@STREAMS
def test_texts_have_one_axis(server: RunningServer, model: str, values: dict[str, Any]) -> None:
    """Clients read output[0].decode() and batch_index[0][0], as end_to_end_grpc_client.py of tensorrtllm_backend does."""
    inputs = {"text_input": PROMPT, "max_tokens": 100, **values}
    with Stream(server) as stream:
        stream.send(model, **inputs, stream=True)
        parts = [result.as_numpy("text_output")[0].decode() for result in stream.rest()]
        stream.send(model, **inputs)
        (whole,) = stream.rest()
    assert "".join(parts) == TEXT and whole.as_numpy("text_output").shape == (1,)
    assert whole.as_numpy("batch_index")[0][0] == whole.as_numpy("sequence_index")[0][0] == 0
    for client, url in ((thttp, server.http), (tgrpc, server.grpc)):
        connection = client.InferenceServerClient(url)
        result = connection.infer(model, tensors(client, **inputs, num_return_sequences=2))
        connection.close()
        assert result.as_numpy("text_output").shape == (2,) and result.as_numpy("cum_log_probs").shape == (1, 2)


@STREAMS
def test_a_stream_carries_many_requests(server: RunningServer) -> None:
    with Stream(server) as stream:
        for i in range(20):
            stream.send("ensemble", f"r{i}", text_input=PROMPT, max_tokens=100, stream=True)
        parts: dict[str, str] = {}
        left = 20
        while left:
            result = stream.next()
            name = result.get_response().id
            parts[name] = parts.get(name, "") + text(result)
            left -= final(result)
    assert parts == {f"r{i}": TEXT for i in range(20)}


@TENSORS
def test_three_models_by_hand_equal_the_ensemble(server: RunningServer) -> None:
    client = tgrpc.InferenceServerClient(server.grpc)
    words = {"STOP_WORDS_DICT": ["here"], "BAD_WORDS_DICT": ["cat"], "EMBEDDING_BIAS_WORDS": ["a"], "EMBEDDING_BIAS_WEIGHTS": [1.5]}
    before = client.infer("preprocessing", tensors(tgrpc, QUERY=PROMPT, REQUEST_OUTPUT_LEN=100, **words))
    ids = tokenizer().encode(PROMPT)
    assert before.as_numpy("INPUT_ID").tolist() == [ids] and before.as_numpy("REQUEST_INPUT_LEN").tolist() == [[len(ids)]]
    assert before.as_numpy("OUT_END_ID").tolist() == [[2]] and before.as_numpy("OUT_PAD_ID").tolist() == [[2]]
    stop, bad = before.as_numpy("STOP_WORDS_IDS"), before.as_numpy("BAD_WORDS_IDS")
    assert stop.shape[:2] == (1, 2) and (stop[0, 1] != -1).sum() == 2 == (bad[0, 1] != -1).sum()
    assert before.as_numpy("EMBEDDING_BIAS").shape == (1, 512) and before.as_numpy("EMBEDDING_BIAS").sum() == 1.5
    names = {
        "input_ids": "INPUT_ID", "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN", "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID", "stop_words_list": "STOP_WORDS_IDS", "bad_words_list": "BAD_WORDS_IDS", "embedding_bias": "EMBEDDING_BIAS",
        "decoder_input_ids": "DECODER_INPUT_ID",
    }  # fmt: skip
    middle = client.infer("tensorrt_llm", tensors(tgrpc, **{ours: before.as_numpy(theirs) for ours, theirs in names.items()}))
    after = client.infer(
        "postprocessing",
        tensors(tgrpc, TOKENS_BATCH=middle.as_numpy("output_ids"), SEQUENCE_LENGTH=middle.as_numpy("sequence_length")),
    )
    assert text(after, "OUTPUT") == PROMPT + TEXT
    ensemble = client.infer("ensemble", tensors(tgrpc, text_input=PROMPT, max_tokens=100))
    assert text(ensemble) == text(after, "OUTPUT")
    client.close()
    sent = server.executor.requests[-2]
    assert sent.params.logit_bias == dict.fromkeys(tokenizer().encode("a", add_special_tokens=False), 1.5)
    assert set(sent.params.bad_words) == {tuple(tokenizer().encode(word, add_special_tokens=False)) for word in ("cat", " cat")}


@TENSORS
def test_token_ids_stop_words_scores_and_sequences(server: RunningServer) -> None:
    ids = tokenizer().encode(TEXT, add_special_tokens=False)
    word = ids[6:9]
    client = tgrpc.InferenceServerClient(server.grpc)
    inputs = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 100, "end_id": 2, "return_log_probs": True}
    stop = np.array([[word, [3, -1, -1]]], np.int32)
    result = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, stop_words_list=stop))
    assert result.as_numpy("output_ids").tolist() == [[[5, 6, 7, *ids[:9]]]] and result.as_numpy("sequence_length").tolist() == [[12]]
    assert result.as_numpy("output_log_probs").tolist() == [[[-0.5] * 9]] and result.as_numpy("cum_log_probs").tolist() == [[-0.5]]
    assert result.as_numpy("context_logits").shape == (1, 1, 1) and result.as_numpy("generation_logits").shape == (1, 1, 1, 1)
    result = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, num_return_sequences=3, exclude_input_in_output=True))
    lengths = [len(ids) + 1 - i for i in range(3)]
    assert result.as_numpy("sequence_length").tolist() == [lengths]
    rows = [row[:length] for row, length in zip(result.as_numpy("output_ids")[0].tolist(), lengths, strict=True)]
    assert rows == [[*ids[: len(ids) - i], 2] for i in range(3)]
    client.close()
    with Stream(server) as stream:
        stream.send("tensorrt_llm", "tokens", **inputs, streaming=True, stop_words_list=stop)
        results = stream.rest()
    joined = [token for result in results for token in result.as_numpy("output_ids")[0, 0].tolist()]
    assert joined == ids[:9] and len(results) > 3
    until(lambda: not server.executor.running)  # the rest of the sequence was cancelled


@TENSORS
def test_rows_of_a_batch_are_combined(server: RunningServer) -> None:
    client = thttp.InferenceServerClient(server.http)
    ids = np.array([[5, 6, 7, 0], [5, 6, 7, 8]], np.int32)
    column = lambda *values: np.array(values, np.int32)[:, None]  # noqa: E731
    inputs = tensors(
        thttp, input_ids=ids, input_lengths=column(3, 4), request_output_len=column(2, 5), end_id=column(2, 2), pad_id=column(9, 9)
    )
    result = client.infer("tensorrt_llm", inputs)
    ids_of_text = tokenizer().encode(TEXT, add_special_tokens=False)
    assert result.as_numpy("output_ids").tolist() == [[[5, 6, 7, *ids_of_text[:2], 9, 9, 9, 9]], [[5, 6, 7, 8, *ids_of_text[:5]]]]
    assert result.as_numpy("sequence_length").tolist() == [[5], [9]] and result.as_numpy("batch_index").tolist() == [[0], [1]]
    both = np.array([[b"The"], [b"The dog"]], object)
    result = client.infer("ensemble", tensors(thttp, text_input=both, max_tokens=column(100, 100)))
    assert [item.decode() for item in result.as_numpy("text_output").flat] == ["The" + TEXT, "The dog" + TEXT]
    assert result.as_numpy("text_output").shape == (2,)
    before = client.infer("preprocessing", tensors(thttp, QUERY=both, REQUEST_OUTPUT_LEN=column(1, 1)))
    assert before.as_numpy("STOP_WORDS_IDS").shape == (2, 2, 0) and before.as_numpy("EMBEDDING_BIAS").shape == (2, 0)
    client.close()
    with Stream(server) as stream:
        stream.send("ensemble", "rows", text_input=both, max_tokens=column(100, 100), stream=np.array([[True], [True]]))
        results = stream.rest()
    for row in (0, 1):
        assert "".join(text(r) for r in results if r.as_numpy("batch_index").item() == row) == TEXT
    assert sum(map(final, results)) == 1


@STREAMS
def test_accumulate_tokens() -> None:
    options = TritonOptions(models=default_models(), accumulate_tokens=True)
    with running(options=options) as server, Stream(server) as stream:
        stream.send("tensorrt_llm_bls", text_input=PROMPT, max_tokens=100, stream=True)
        texts = list(map(text, stream.rest()))
        assert texts[-1] == TEXT and all(TEXT.startswith(part) for part in texts)
        stream.send("ensemble", text_input=PROMPT, max_tokens=100, stream=True)
        assert "".join(map(text, stream.rest())) == TEXT


@STREAMS
def test_stop_tensor_and_cancelled_stream_end_the_request() -> None:
    with running(endless, step_s=0.002) as server:
        with Stream(server) as stream:
            inputs = {"input_ids": [5], "input_lengths": 1, "request_output_len": 250}
            stream.send("tensorrt_llm", "mine", **inputs, streaming=True)
            stream.next()
            stream.send("tensorrt_llm", "mine", **inputs, stop=True, empty_final=True)
            assert stream.rest() and stream.rest()  # the end of the stop request, and of the request that it ended
            until(lambda: not server.executor.running)
            stream.send("tensorrt_llm", "", **inputs, stop=True)
            with pytest.raises(InferenceServerException, match="request_id"):
                stream.rest()
            stream.send("tensorrt_llm", "unknown", **inputs, stop=True, empty_final=True)
            while (result := stream.next()).get_response().id != "unknown":
                pass
            assert final(result) and not result.get_response().outputs
            stream.send("tensorrt_llm", "left", **inputs, streaming=True)
            until(lambda: bool(server.executor.running))
        until(lambda: not server.executor.running and not len(server.core.in_flight))


@STREAMS
def test_duplicate_ids_priority_timeout_and_number_of_drafts() -> None:
    with running(endless, step_s=0.002) as server, Stream(server) as stream:
        stream.send("ensemble", "twice", text_input=PROMPT, max_tokens=250, stream=True, options={"priority": 7})
        stream.next()
        other = thttp.InferenceServerClient(server.http)
        with pytest.raises(InferenceServerException, match="a request with this id is in flight"):
            other.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=3), request_id="twice")
        result = other.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=3), timeout=5_000_000, priority=2)
        assert result.get_response()["outputs"]
        assert [(r.priority, r.timeout_s is not None) for r in server.executor.requests] == [(7, False), (2, True)]
        other.infer("tensorrt_llm_bls", tensors(thttp, text_input=PROMPT, max_tokens=3, num_draft_tokens=2))
        assert [r.max_drafts for r in server.executor.requests] == [None, None, 2]
        with pytest.raises(InferenceServerException, match="num_draft_tokens=-1 is refused: it must be at least 0"):
            other.infer("tensorrt_llm_bls", tensors(thttp, text_input=PROMPT, max_tokens=3, num_draft_tokens=-1))
        with pytest.raises(InferenceServerException, match="priority"):
            other.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=3), priority=1 << 40)
        other.close()


@UNARY
def test_grpc_errors_are_the_recorded_ones() -> None:
    recorded = dict(
        line.split(": ", 1) for line in (Path(__file__).parent / "recorded" / "50_grpc_errors.out").read_text().splitlines() if line
    )

    def error_of(call: Any) -> str:
        with pytest.raises(InferenceServerException) as found:
            call()
        return f"{found.value.status()} | {found.value.message()}"

    options = TritonOptions(models=default_models())
    with running(lambda request, index: [], options=options) as server:
        client = tgrpc.InferenceServerClient(server.grpc)
        inputs = tensors(tgrpc, text_input=PROMPT, max_tokens=3)
        assert error_of(lambda: client.infer("ensemble", inputs)) == recorded["grpc unary on decoupled"]
        assert error_of(lambda: client.infer("nope", inputs)) == recorded["grpc unknown model"]
        assert error_of(lambda: client.get_model_metadata("nope")) == recorded["grpc unknown metadata"]
        missing = error_of(lambda: client.infer("preprocessing", tensors(tgrpc, QUERY="x"), request_id="r9"))
        assert missing.startswith("StatusCode.INVALID_ARGUMENT | [request id: r9] expected number of inputs between 2 and ")
        expected = recorded["grpc missing input"].split("'gen'. ")[1]
        assert missing.endswith(expected.replace("text_input", "QUERY").replace("max_tokens", "REQUEST_OUTPUT_LEN"))
        client.close()


@CONTROL
def test_explicit_model_control() -> None:
    options = TritonOptions(models=default_models(), unary=True, model_control="explicit")
    with running(options=options) as server:
        client = thttp.InferenceServerClient(server.http)
        client.unload_model("ensemble")
        assert not client.is_model_ready("ensemble") and client.is_model_ready("tensorrt_llm")
        states = {row["name"]: row["state"] for row in client.get_model_repository_index()}
        assert states["ensemble"] == "UNAVAILABLE" and states["tensorrt_llm_bls"] == "READY"
        with pytest.raises(InferenceServerException, match="no available versions"):
            client.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=3))
        client.load_model("ensemble")
        assert text(client.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=100))) == PROMPT + TEXT
        with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
            client.load_model("nope")
        # The config of a load, as in simple_http_model_control.py; a load without one restores the repository's.
        config = client.get_model_config("ensemble")
        client.load_model("ensemble", config=json.dumps({**config, "max_batch_size": "16"}))
        assert client.get_model_config("ensemble")["max_batch_size"] == 16
        rows = tensors(thttp, text_input=np.full((17, 1), b"x", object), max_tokens=np.full((17, 1), 3, np.int32))
        with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 16 for 'ensemble'"):
            client.infer("ensemble", rows)
        for wrong, error in [
            ('"parameters": {"config": {{"max_batch_size": "16"}}}', "failed to load 'ensemble', the config is not JSON"),
            ('{"max_batch_size": 0}', "max_batch_size is 0, and it must be from 1 to"),
            ('{"platform": "onnx"}', "only max_batch_size can be replaced, and the config has another 'platform'"),
            ("[]", "the config is not a JSON object"),
        ]:
            with pytest.raises(InferenceServerException, match=re.escape(error)):
                client.load_model("ensemble", config=wrong)
        with pytest.raises(InferenceServerException, match=r"parameter 'file:1/model\.py' is not supported"):
            client.load_model("ensemble", config="{}", files={"file:1/model.py": b"x"})
        client.load_model("ensemble")
        assert client.get_model_config("ensemble")["max_batch_size"] == 256
        with tgrpc.InferenceServerClient(server.grpc) as grpc_client:
            grpc_client.unload_model("tensorrt_llm", unload_dependents=True)
            assert not grpc_client.is_model_ready("tensorrt_llm") and grpc_client.is_server_ready()
            grpc_client.load_model("tensorrt_llm", config='{"max_batch_size": 8}')
            assert grpc_client.get_model_config("tensorrt_llm").config.max_batch_size == 8
            with pytest.raises(InferenceServerException, match="failed to unload 'nope'"):
                grpc_client.unload_model("nope")
        client.close()


@CONTROL
def test_metrics_under_both_names(server: RunningServer) -> None:
    import httpx

    client = thttp.InferenceServerClient(server.http)
    client.infer("ensemble", tensors(thttp, text_input=PROMPT, max_tokens=5))
    client.close()
    shown = httpx.get(f"http://{server.http}/metrics").text
    counts = {}
    for line in shown.splitlines():
        name, _, value = line.rpartition(" ")
        counts[name] = value
    of = lambda name, model: float(counts[f'{name}{{model="{model}",version="1"}}'])  # noqa: E731
    assert of("nv_inference_request_success", "ensemble") >= 1
    assert of("nv_inference_count", "preprocessing") >= of("nv_inference_count", "ensemble")
    recorded = (Path(__file__).parent / "recorded" / "40_metrics.txt").read_text()
    families = set(re.findall(r"(?m)^# TYPE (\S+ \S+)$", recorded))
    missing = {line.split()[0] for line in families - set(re.findall(r"(?m)^# TYPE (\S+ \S+)$", shown))}
    assert all(name.startswith(("nv_cpu_", "nv_pinned_memory_")) for name in missing)
    assert of("nv_inference_exec_count", "ensemble") == of("nv_inference_request_success", "ensemble")
    assert "# TYPE nv_inference_request_success counter" in shown and "nv_inference_request_success_total" not in shown
    assert 'nv_inference_request_failure{model="ensemble",reason="CANCELED",version="1"}' in counts
    gauges = {
        "request_metrics": 'request_type="waiting"',
        "kv_cache_block_metrics": 'kv_cache_block_type="fraction"',
        "inflight_batcher_metrics": 'inflight_batcher_specific_metric="generation_requests"',
        "general_metrics": 'general_type="timestamp"',
        "runtime_memory_metrics": 'memory_type="gpu"',
    }
    for name, label in gauges.items():
        assert any(f"nv_trt_llm_{name}" in key and label in key and 'model="tensorrt_llm"' in key for key in counts)


@UNARY
def test_limits_of_named_keys_over_grpc(tmp_path: Path) -> None:
    """A message on a stream counts as one request, as a call with one response does."""
    key = "a-key-of-this-server"
    (tmp_path / "keys.yaml").write_text(f"keys:\n  - name: team\n    key: {key}\n    requests_per_minute: 2\n")
    headers = {"authorization": f"Bearer {key}"}
    with running(api_keys_file=str(tmp_path / "keys.yaml")) as server:
        client = tgrpc.InferenceServerClient(server.grpc)
        inputs = tensors(tgrpc, text_input=PROMPT, max_tokens=100)
        assert text(client.infer("ensemble", inputs, headers=headers)) == PROMPT + TEXT
        client.get_server_metadata(headers=headers)  # does not count
        with Stream(server, headers) as stream:
            stream.send("ensemble", text_input=PROMPT, max_tokens=100)
            assert text(stream.next()) == PROMPT + TEXT
            stream.send("ensemble", text_input=PROMPT, max_tokens=100)
            with pytest.raises(InferenceServerException, match="the limit requests_per_minute=2 of the key team is reached"):
                stream.next()
        with pytest.raises(InferenceServerException, match="Retry after") as found:
            client.infer("ensemble", inputs, headers=headers)
        assert found.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as failed:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="ensemble"), metadata=tuple(headers.items()))
        metadata = dict(failed.value.trailing_metadata())
        assert metadata["x-ratelimit-remaining-requests"] == "0" and 1 <= int(metadata["retry-after"]) <= 60
        client.close()


@UNARY
def test_api_keys_over_grpc() -> None:
    key = "a-key-of-this-server"
    with running(api_keys=(key,)) as server:
        client = tgrpc.InferenceServerClient(server.grpc)
        inputs = tensors(tgrpc, text_input=PROMPT, max_tokens=100)
        assert client.is_server_live() and client.is_server_ready()
        for headers in (None, {"authorization": "Bearer wrong"}):
            with pytest.raises(InferenceServerException) as found:
                client.infer("ensemble", inputs, headers=headers)
            assert found.value.status() == "StatusCode.UNAUTHENTICATED"
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert text(client.infer("ensemble", inputs, headers=headers)) == PROMPT + TEXT
        client.close()
        with Stream(server) as stream, pytest.raises(InferenceServerException, match="API key"):
            stream.next()  # the stream is refused when it opens
