"""The models of an exported repository, run with a stand-in for the Python backend of a Triton server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from stoker.deploy.deployment import EngineInfo
from stoker.deploy.triton.export import export_triton
from stoker.deploy.triton.hosted.bls import BLSModel
from stoker.deploy.triton.hosted.model import ResponseSender, engine_directory
from stoker.deploy.triton.hosted.tokenizer import TokenizerModel
from stoker.deploy.triton.load import load_repository

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError(Exception):
    CANCELLED, INTERNAL = "cancelled", "internal"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code

    def message(self) -> str:
        return str(self)


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """Triton's own sender: it raises when it is used after the final flag."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        self.cancel = False

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set()
        return self.cancel

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set()
        if response is not None:
            self.responses.append(response)
        if flags == FINAL:
            self.ended.set()


class Request:
    def __init__(self, **inputs: Any) -> None:
        self.sender, self._inputs = Sender(), inputs

    def get_response_sender(self) -> Sender:
        return self.sender

    def request_id(self) -> str:
        return "r"

    def parameters(self) -> str:
        return ""

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self._inputs.items()]


class Backend:
    """The module triton_python_backend_utils. `models` run the requests that the BLS model makes."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    Tensor, InferenceResponse, TritonError = Tensor, InferenceResponse, TritonError

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def InferenceRequest(self, *, model_name: str, inputs: list[Tensor], **_: Any) -> Any:
        async def async_exec(decoupled: bool = False) -> Any:
            responses = self.models[model_name]({tensor.name(): tensor.as_numpy() for tensor in inputs})
            return responses if decoupled else responses[0]

        return SimpleNamespace(async_exec=async_exec)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The repository of an engine with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    engine = tmp_path / "engine"
    engine.mkdir()
    tokenizer.save(str(engine / "tokenizer.json"))
    (engine / "config.json").write_text(json.dumps({"limits": {"max_input_len": 64}, "model": {"vocab_size": 256}}))
    info = EngineInfo(path=str(engine), architecture="LlamaForCausalLM", vocab_size=256)
    export_triton(info, tmp_path / "repo", {"decoupled_mode": "true"})
    return tmp_path / "repo"


@pytest.fixture
def hosted(repository: Path) -> Iterator[Any]:
    """Creates a model of the repository; ends it after the test."""
    running: list[Any] = []

    def start(kind: type, name: str, backend: Any = None) -> Any:
        running.append(kind(backend or Backend(), {"model_repository": str(repository / name), "model_name": name}))
        return running[-1]

    yield start
    for model in running:
        model.finalize()


def respond(model: Any, request: Request) -> list[InferenceResponse]:
    model.execute([request])
    assert request.sender.ended.wait(10)
    return request.sender.responses


def outputs(response: InferenceResponse) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def text(*values: str) -> Any:
    return np.array([[value.encode() for value in values]], np.object_)


def test_the_exported_files_call_these_classes(repository: Path) -> None:
    for name, kind in {"preprocessing": TokenizerModel, "postprocessing": TokenizerModel, "tensorrt_llm_bls": BLSModel}.items():
        source = (repository / name / "1" / "model.py").read_text()
        assert f"from {kind.__module__} import {kind.__name__}\n" in source
        compile(source, name, "exec")
    assert "hosted.engine import EngineModel" in (repository / "tensorrt_llm" / "1" / "model.py").read_text()
    assert not (repository / "ensemble" / "1" / "model.py").exists()


def test_text_to_ids_and_back(hosted: Any) -> None:
    (encoded,) = respond(hosted(TokenizerModel, "preprocessing"), Request(QUERY=text("hi é"), REQUEST_OUTPUT_LEN=np.array([[5]], np.int32)))
    ids = outputs(encoded)["INPUT_ID"]
    assert ids.shape == (1, 5) and outputs(encoded)["REQUEST_OUTPUT_LEN"].tolist() == [[5]]
    request = Request(TOKENS_BATCH=ids[:, None], SEQUENCE_LENGTH=np.array([[5]], np.int32))
    (decoded,) = respond(hosted(TokenizerModel, "postprocessing"), request)
    assert outputs(decoded)["OUTPUT"].tolist() == ["hi é".encode()]


def test_an_error_is_the_last_response(hosted: Any) -> None:
    request = Request(TOKENS_BATCH=np.array([[[1, 2]]], np.int32), SEQUENCE_LENGTH=np.array([[9]], np.int32))
    (response,) = respond(hosted(TokenizerModel, "postprocessing"), request)
    error = response.error()
    assert error is not None and "SEQUENCE_LENGTH=9 is refused" in error.message() and error.code == TritonError.INTERNAL


def test_a_sender_is_not_used_after_the_final_flag() -> None:
    sender = Sender()
    wrapped = ResponseSender(Backend(), sender)
    wrapped.end()
    wrapped.end()
    wrapped.fail("too late", TritonError.INTERNAL)
    assert not wrapped.cancelled() and sender.responses == []


def bls_backend() -> Backend:
    """tensorrt_llm generates the bytes of "aé" one by one; the other models call the tokenizer's stand-ins."""
    backend = Backend()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [alphabet.index(char) for char in ("a", "Ã", "©")]

    def generate(inputs: dict[str, Any]) -> Iterator[InferenceResponse]:
        for token in spelled:
            tensors = {"output_ids": np.array([[[token]]], np.int32), "sequence_length": np.array([[1]], np.int32)}
            yield InferenceResponse(Tensor(name, array) for name, array in tensors.items())

    def decode(inputs: dict[str, Any]) -> list[InferenceResponse]:
        ids = inputs["TOKENS_BATCH"][0, 0].tolist()
        decoded = bytes({spelled[0]: 0x61, spelled[1]: 0xC3, spelled[2]: 0xA9}[token] for token in ids).decode("utf-8", "replace")
        return [InferenceResponse([Tensor("OUTPUT", text(decoded))])]

    backend.models = {
        "preprocessing": lambda inputs: [InferenceResponse([Tensor("INPUT_ID", np.array([[1]], np.int32))])],
        "tensorrt_llm": generate,
        "postprocessing": decode,
    }
    return backend


def test_bls_streams_whole_characters(hosted: Any) -> None:
    model = hosted(BLSModel, "tensorrt_llm_bls", bls_backend())
    request = Request(text_input=text("x"), max_tokens=np.array([[3]], np.int32), stream=np.array([[True]]))
    texts = [outputs(response)["text_output"][0].decode() for response in respond(model, request)]
    assert texts == ["a", "", "é"]


def test_bls_passes_on_errors(hosted: Any) -> None:
    backend = bls_backend()
    backend.models["preprocessing"] = lambda inputs: [InferenceResponse(error=TritonError("no tokenizer"))]
    request = Request(text_input=text("x"), max_tokens=np.array([[3]], np.int32))
    (response,) = respond(hosted(BLSModel, "tensorrt_llm_bls", backend), request)
    error = response.error()
    assert error is not None and "no tokenizer" in error.message()


def test_a_cancelled_request_ends(hosted: Any) -> None:
    backend = bls_backend()
    released = threading.Event()

    def wait(inputs: dict[str, Any]) -> Iterator[InferenceResponse]:
        released.wait(10)
        yield from ()

    backend.models["tensorrt_llm"] = wait
    request = Request(text_input=text("x"), max_tokens=np.array([[3]], np.int32), stream=np.array([[True]]))
    request.sender.cancel = True
    (response,) = respond(hosted(BLSModel, "tensorrt_llm_bls", backend), request)
    released.set()
    error = response.error()
    assert error is not None and error.code == TritonError.CANCELLED


def test_an_engine_that_is_not_local_is_refused(repository: Path) -> None:
    deployment = load_repository(repository, {})
    assert engine_directory(deployment) == str(repository.parent / "engine")
    (repository.parent / "engine").rename(repository.parent / "moved")
    with pytest.raises(Exception, match="gpt_model_path is not a local engine directory"):
        engine_directory(deployment)
