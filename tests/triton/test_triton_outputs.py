"""Outputs of the five models with an engine: beams, KV cache blocks, times, token counts, and every output of the metadata.

The requests are those of tensorrtllm_backend's clients, and responses are read as these clients read them. The oracle of beams is a beam
search over the same engine in this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tgrpc
import tritonclient.http as thttp
from test_triton_clients import Stream, tensors
from triton_server import RunningServer, running_engine
from tritonclient.utils import InferenceServerException

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.frontend.tokenizer import Tokenizer
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models

PROMPT = "the quick brown"
BEAMS = 3
NUM_TOKENS = 9
METRICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns", "first_scheduled_time_ns",
    "first_token_time_ns", "last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(engine_with_beams: Path) -> Path:
    return engine_with_beams


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[RunningServer]:
    options = TritonOptions(models=default_models(), unary=True, max_beam_width=BEAMS)
    with running_engine(engine, options=options) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    connection = tgrpc.InferenceServerClient(server.grpc)
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def beams(engine: Path) -> list[list[int]]:
    """The ids of the best continuations of PROMPT, best first."""
    with LLM(engine, device="cpu", kv_cache_tokens=2048) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, n=BEAMS, beam_width=BEAMS, ignore_eos=True)
        return [choice.token_ids for choice in llm.generate(PROMPT, params).choices]


def rows(engine: Path) -> tuple[Tokenizer, list[int]]:
    tokenizer = Tokenizer.load(engine)
    return tokenizer, tokenizer.encode(PROMPT)


@pytest.mark.compatibility(
    protocol="Triton", client="inflight_batcher_llm_client.py", version="0.5, 0.8, 0.18, 1.x", feature="beams of tensorrt_llm"
)
def test_token_ids_of_all_beams(client: Any, engine: Path, beams: list[list[int]]) -> None:
    tokenizer, ids = rows(engine)
    inputs: dict[str, Any] = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": NUM_TOKENS, "beam_width": BEAMS}
    result = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, return_log_probs=True, temperature=1.0, end_id=-1))
    assert [list(beam) for beam in result.as_numpy("output_ids")[0]] == [[*ids, *beam] for beam in beams]
    assert result.as_numpy("sequence_length").tolist() == [[len(ids) + NUM_TOKENS] * BEAMS]
    assert result.as_numpy("cum_log_probs").shape == (1, BEAMS)
    scores = result.as_numpy("output_log_probs")
    assert scores.shape == (1, BEAMS, NUM_TOKENS) and np.allclose(scores.mean(axis=2), result.as_numpy("cum_log_probs"))
    best = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, num_return_sequences=2, end_id=-1))
    assert best.as_numpy("output_ids").shape == (1, 2, len(ids) + NUM_TOKENS) and best.as_numpy("cum_log_probs").shape == (1, 2)
    with pytest.raises(InferenceServerException, match="num_return_sequences=4 is refused: beam_width is 3"):
        client.infer("tensorrt_llm", tensors(tgrpc, **inputs, num_return_sequences=4))
    texts = client.infer(
        "postprocessing",
        tensors(tgrpc, TOKENS_BATCH=result.as_numpy("output_ids"), SEQUENCE_LENGTH=result.as_numpy("sequence_length")),
    )
    assert [text.decode() for text in texts.as_numpy("OUTPUT")] == [tokenizer.decode([*ids, *beam]) for beam in beams]


def test_shorter_beams_are_padded(client: Any, engine: Path, beams: list[list[int]]) -> None:
    """-1 after the last token, in the ids and in the log-probabilities, as in the C++ backend."""
    _, ids = rows(engine)
    inputs = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": NUM_TOKENS, "beam_width": BEAMS}
    for end in sorted({token for beam in beams for token in beam}):  # the first one that ends some beams early
        result = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, return_log_probs=True, end_id=end))
        lengths = result.as_numpy("sequence_length")[0].tolist()
        if len(set(lengths)) > 1:
            break
    assert min(lengths) < max(lengths) == result.as_numpy("output_ids").shape[2]
    for beam, score, length in zip(result.as_numpy("output_ids")[0], result.as_numpy("output_log_probs")[0], lengths, strict=True):
        assert (beam[:length] >= 0).all() and set(beam[length:].tolist()) <= {-1}
        assert (score[: length - len(ids)] < 0).all() and set(score[length - len(ids) :].tolist()) <= {-1.0}


@pytest.mark.compatibility(
    protocol="Triton", client="end_to_end_grpc_client.py", version="0.5, 0.8, 0.18, 1.x", feature="beams of ensemble and tensorrt_llm_bls"
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_one_text_for_each_beam(server: RunningServer, engine: Path, beams: list[list[int]], model: str) -> None:
    tokenizer, ids = rows(engine)
    inputs = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "stream": False, "beam_width": BEAMS, "temperature": 1.0, "end_id": -1}
    with Stream(server) as stream:
        stream.send(model, **inputs)
        (result,) = stream.rest()
        stream.send(model, **{**inputs, "stream": True})
        with pytest.raises(InferenceServerException, match="beams are not streamed"):
            stream.rest()
    output = result.as_numpy("text_output")
    assert [text.decode() for text in output] == [tokenizer.decode([*ids, *beam]) for beam in beams]
    assert result.as_numpy("cum_log_probs").shape == (1, BEAMS) and result.as_numpy("output_log_probs").shape[:2] == (1, BEAMS)


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"])
@pytest.mark.compatibility(protocol="Triton", client="tritonclient", feature="every output of the metadata can be requested")
def test_every_output_can_be_requested(server: RunningServer, model: str) -> None:
    """A response leaves out what no input enabled, as in the backend of TensorRT-LLM."""
    inputs = {
        "preprocessing": {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 3},
        "tensorrt_llm": {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3},
        "postprocessing": {"TOKENS_BATCH": np.array([[[5, 6]]], np.int32), "SEQUENCE_LENGTH": np.array([[2]], np.int32)},
        "ensemble": {"text_input": PROMPT, "max_tokens": 3},
        "tensorrt_llm_bls": {"text_input": PROMPT, "max_tokens": 3},
    }[model]
    for module, url in ((tgrpc, server.grpc), (thttp, server.http)):
        connection = module.InferenceServerClient(url)
        metadata = connection.get_model_metadata(model, **({"as_json": True} if module is tgrpc else {}))
        names = [output["name"] for output in metadata["outputs"]]
        outputs = [module.InferRequestedOutput(name) for name in names]
        whole = connection.infer(model, tensors(module, **inputs), outputs=outputs)
        default = connection.infer(model, tensors(module, **inputs))
        returned = {name for name in names if whole.as_numpy(name) is not None}
        assert returned == {name for name in names if default.as_numpy(name) is not None}
        assert returned.isdisjoint(METRICS) and len(returned) >= 1
        if model not in ("preprocessing", "postprocessing"):
            flags = {"return_perf_metrics": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
            metered = connection.infer(model, tensors(module, **inputs, **flags), outputs=outputs)
            missing = {name for name in names if metered.as_numpy(name) is None}
            assert missing <= {"context_phase_params"} and set(METRICS) <= set(names)
        connection.close()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.compatibility(
    protocol="Triton",
    client="end_to_end_grpc_client.py",
    version="0.18, 1.x",
    feature="--return-perf-metrics and --return-kv-cache-reuse-stats, streamed and whole",
)
def test_performance_metrics(server: RunningServer, engine: Path, model: str, *, streaming: bool) -> None:
    """The client reads value[0][0] of each metric in each response."""
    text = f"{len(model)} {streaming} {model} and as many other words as it takes to fill blocks"
    ids = Tokenizer.load(engine).encode(text)
    inputs: dict[str, Any] = {"text_input": text, "max_tokens": 5, "stream": streaming}
    if model == "tensorrt_llm":
        inputs = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 5, "streaming": streaming}
    num_blocks, num_full = -(-len(ids) // 16), (len(ids) - 1) // 16
    assert num_full >= 2
    before = time.monotonic_ns()
    with Stream(server) as stream:
        for reused in (0, num_full):
            stream.send(model, **inputs, return_perf_metrics=True, return_num_input_tokens=True, return_num_output_tokens=True, end_id=-1)
            results = stream.rest()
            assert len(results) == 5 if streaming and model == "tensorrt_llm" else len(results) >= 1
            values = [{name: result.as_numpy(name)[0][0] for name in METRICS} for result in results]
            for found in values:
                assert found["kv_cache_reused_blocks"] == reused
                assert found["kv_cache_alloc_total_blocks"] == num_blocks - reused >= found["kv_cache_alloc_new_blocks"] >= 0
                assert found["acceptance_rate"] == found["total_draft_tokens"] == found["total_accepted_draft_tokens"] == 0
                times = [found[name] for name in METRICS[3:7]]
                assert before <= times[0] and times == sorted(times) and times[-1] <= time.monotonic_ns()
            assert len({tuple(found[name] for name in METRICS[3:6]) for found in values}) == 1
            assert {result.as_numpy("num_input_tokens")[0][0] for result in results} == {len(ids)}
            assert sum(result.as_numpy("num_output_tokens")[0][0] for result in results) <= 5
        stream.send(model, **inputs, return_kv_cache_reuse_stats=True)
        last = stream.rest()[-1]
    assert last.as_numpy("kv_cache_reused_blocks")[0][0] == num_full and last.as_numpy("arrival_time_ns") is None


def test_metrics_of_rows_and_sequences(client: Any, server: RunningServer) -> None:
    """One response has a value per row and sequence. An output that only some rows request is left out."""
    column = lambda *values: np.array(values)[:, None]  # noqa: E731
    inputs = {"input_ids": np.array([[5, 6, 7], [8, 9, 10]], np.int32), "input_lengths": np.array([[3], [3]], np.int32)}
    inputs |= {"request_output_len": np.array([[2], [2]], np.int32), "num_return_sequences": np.array([[2], [2]], np.int32)}
    both = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, return_perf_metrics=column(True, True)))
    assert {both.as_numpy(name).shape for name in METRICS} == {(2, 2)}
    one = client.infer("tensorrt_llm", tensors(tgrpc, **inputs, return_perf_metrics=column(True, False)))
    assert {one.as_numpy(name) is None for name in METRICS} == {True} and one.as_numpy("output_ids").shape == (2, 2, 5)
    with Stream(server) as stream:
        stream.send("ensemble", text_input=PROMPT, max_tokens=4, stream=True, num_return_sequences=2, return_perf_metrics=True)
        results = stream.rest()
    assert {result.as_numpy("sequence_index")[0][0] for result in results} == {0, 1}
    assert all(result.as_numpy("first_scheduled_time_ns")[0][0] > 0 for result in results)


@pytest.mark.compatibility(
    protocol="Triton", client="benchmark_core_model.py", version="0.8, 0.18, 1.x", feature="token-norm-dist: ids beyond the vocabulary"
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_ids_beyond_the_vocabulary(server: RunningServer, protocol: str) -> None:
    """The prompts are random int32 numbers. They are answered as they were sent, and an end id beyond the vocabulary has no effect."""
    module = {"http": thttp, "grpc": tgrpc}[protocol]
    prompts = np.random.default_rng(420).integers(0, np.iinfo(np.int32).max, (1, 12), np.int32)
    connection = module.InferenceServerClient(getattr(server, protocol))
    column = lambda value: np.array([[value]], np.int32)  # noqa: E731
    inputs = {"input_ids": prompts, "input_lengths": column(12), "request_output_len": column(100)}
    warm_up = connection.infer("tensorrt_llm", tensors(module, **inputs), request_id="0")
    assert warm_up.as_numpy("output_ids")[0, 0, :12].tolist() == prompts[0].tolist()
    for end_id in (-1, 50256):
        result = connection.infer("tensorrt_llm", tensors(module, **inputs, end_id=column(end_id)), request_id="1")
        assert result.as_numpy("sequence_length").tolist() == [[112]]
        assert result.as_numpy("output_ids").tolist() == warm_up.as_numpy("output_ids").tolist()
    with pytest.raises(InferenceServerException, match="input_ids=-7 is refused"):
        connection.infer("tensorrt_llm", tensors(module, **{**inputs, "input_ids": np.full((1, 12), -7, np.int32)}))
    connection.close()
