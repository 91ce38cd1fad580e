"""The Python gpt repository of release 0.5, with requests of its client.py, client_async.py, identity_test.py and end_to_end_test.py."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tgrpc
import tritonclient.http as thttp
from triton_server import RunningServer, running_engine
from tritonclient.utils import np_to_triton_dtype

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.deploy.triton.fill import fill_template
from stoker.deploy.triton.load import load_repository
from stoker.frontend.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
import triton_templates as templates

TEXT = "Born in north-east France, Soyer trained as a"
OUTPUT_LEN = 10
MODULES = {"http": thttp, "grpc": tgrpc}


@pytest.fixture(scope="module")
def server(engine_with_beams: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    pairs = f"engine_dir:{engine_with_beams},tokenizer_dir:{engine_with_beams},tokenizer_type:auto"
    files = {name: fill_template(text, pairs) for name, text in templates.gpt_repository().items()}
    files["tensorrt_llm"] += templates.parameter("max_beam_width", "3")
    deployment = load_repository(templates.write(tmp_path_factory.mktemp("gpt"), files), {})
    with running_engine(engine_with_beams, options=deployment.server.options, add_special_tokens=True) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def tokenizer(engine_with_beams: Path) -> Tokenizer:
    return Tokenizer.load(engine_with_beams)


def prepared(module: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def token_inputs(ids: np.ndarray, *, beam_width: int = 1, top_k: int = 1, top_p: float = 0.0) -> dict[str, np.ndarray]:
    """The inputs of tools/utils/utils.py, with its dtypes. The pad and end ids are those of GPT-2."""
    column = lambda value, dtype: np.full((len(ids), 1), value).astype(dtype)  # noqa: E731
    return {
        "input_ids": ids,
        "input_lengths": column(ids.shape[1], np.int32),
        "request_output_len": column(OUTPUT_LEN, np.uint32),
        "pad_id": column(50256, np.uint32),
        "end_id": column(50256, np.uint32),
        "beam_width": column(beam_width, np.uint32),
        "temperature": column(1.0, np.float32),
        "runtime_top_k": column(top_k, np.uint32),
        "runtime_top_p": column(top_p, np.float32),
        "len_penalty": column(1.0, np.float32),
        "repetition_penalty": column(1.0, np.float32),
        "min_length": column(1, np.uint32),
        "presence_penalty": column(0.0, np.float32),
        "random_seed": column(0, np.uint64),
        "output_log_probs": column(True, bool),
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.compatibility(
    protocol="Triton", client="client.py of the gpt model", version="0.5", feature="the Python gpt model over HTTP and gRPC"
)
def test_client(server: RunningServer, engine_with_beams: Path, tokenizer: Tokenizer, protocol: str) -> None:
    """The client prints what follows the prompt in the flat output_ids."""
    ids = np.array([tokenizer.encode(TEXT)], np.int32)
    with MODULES[protocol].InferenceServerClient(getattr(server, protocol)) as client:
        assert client.is_model_ready("tensorrt_llm") and client.is_model_ready("ensemble")
        result = client.infer("tensorrt_llm", prepared(MODULES[protocol], token_inputs(ids)))
    output = result.as_numpy("output_ids")
    assert output.shape == (1, 1, ids.shape[1] + OUTPUT_LEN) and result.as_numpy("log_probs").shape == (1, OUTPUT_LEN, 1)
    with LLM(engine_with_beams, device="cpu", kv_cache_tokens=2048) as llm:
        expected = llm.generate(TEXT, SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)).choices[0].token_ids
    assert output.reshape(output.size).tolist()[ids.shape[1] :] == expected


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.compatibility(
    protocol="Triton",
    client="client_async.py and identity_test.py of the gpt model",
    version="0.5",
    feature="batches of random ids, sync and async",
)
def test_identity_and_asynchronous_requests(server: RunningServer, protocol: str) -> None:
    """identity_test.py sends ids below 50255, which may lie beyond the vocabulary."""
    ids = np.random.default_rng(1).integers(0, 50255, (8, 8), np.int32)
    inputs = prepared(MODULES[protocol], token_inputs(ids))
    with MODULES[protocol].InferenceServerClient(getattr(server, protocol), **({"concurrency": 4} if protocol == "http" else {})) as client:
        whole = client.infer("tensorrt_llm", inputs).as_numpy("output_ids")
        if protocol == "http":
            pending = [client.async_infer("tensorrt_llm", inputs) for _ in range(3)]
            results = [request.get_result() for request in pending]
        else:
            done: queue.Queue[tuple[Any, Any]] = queue.Queue()
            for _ in range(3):
                client.async_infer("tensorrt_llm", inputs, lambda result, error: done.put((result, error)))
            answers = [done.get(timeout=60) for _ in range(3)]
            assert [error for _, error in answers] == [None] * 3
            results = [result for result, _ in answers]
    assert whole.shape == (8, 1, 8 + OUTPUT_LEN) and whole[:, 0, :8].tolist() == ids.tolist()
    assert all((result.as_numpy("output_ids") == whole).all() for result in results)


def test_beams_and_sampling(server: RunningServer, tokenizer: Tokenizer) -> None:
    """Shorter beams are padded with pad_id, because the model has no output with lengths; postprocessing decodes all of them."""
    ids = np.array([tokenizer.encode(TEXT)], np.int32)
    with tgrpc.InferenceServerClient(server.grpc) as client:
        result = client.infer("tensorrt_llm", prepared(tgrpc, token_inputs(ids, beam_width=3)))
        output = result.as_numpy("output_ids")
        assert output.shape == (1, 3, ids.shape[1] + OUTPUT_LEN) and (output >= 0).all()
        assert result.as_numpy("log_probs").shape == (1, OUTPUT_LEN, 3)
        texts = client.infer("postprocessing", prepared(tgrpc, {"TOKENS_BATCH": output})).as_numpy("OUTPUT")
        assert [text.decode() for text in texts] == [tokenizer.decode(beam.tolist()) for beam in output[0]]
        sampled = client.infer("tensorrt_llm", prepared(tgrpc, token_inputs(ids, top_k=5, top_p=0.9)))
        assert sampled.as_numpy("output_ids").shape == (1, 1, ids.shape[1] + OUTPUT_LEN)


@pytest.mark.compatibility(
    protocol="Triton", client="end_to_end_test.py of the gpt model", version="0.5", feature="ensemble with INPUT_0 to OUTPUT_0"
)
def test_the_ensemble(server: RunningServer, tokenizer: Tokenizer) -> None:
    texts = [[TEXT], ["the quick"]]
    inputs: dict[str, np.ndarray] = {
        "INPUT_0": np.array(texts, object),
        "INPUT_1": np.full((2, 1), OUTPUT_LEN, np.uint32),
        "INPUT_2": np.array([[""], [""]], object),
        "INPUT_3": np.array([[""], [""]], object),
        "runtime_top_k": np.full((2, 1), 1, np.uint32),
        "end_id": np.full((2, 1), 50256, np.uint32),
    }
    for protocol, module in MODULES.items():
        with module.InferenceServerClient(getattr(server, protocol)) as client:
            output = client.infer("ensemble", prepared(module, inputs)).as_numpy("OUTPUT_0")
            single = {name: array[:1] for name, array in inputs.items()}
            beams = client.infer("ensemble", prepared(module, {**single, "beam_width": np.array([[2]], np.uint32)})).as_numpy("OUTPUT_0")
        assert output.shape == (2,) and beams.shape == (2,)
        assert all(text.decode().startswith(prompt) for text, (prompt,) in zip(output, texts, strict=True))
        assert all(text.decode().startswith(TEXT) for text in beams)
