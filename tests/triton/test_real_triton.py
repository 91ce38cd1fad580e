"""An exported repository in a real Triton server, whose ensemble and BLS models use Stoker's executor.

The oracle is the same engine in this process. The package of the server is installed once, in the cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from free_ports import free_port
from test_triton_clients import Stream, tensors, text
from tritonclient.utils import InferenceServerException

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.triton.export import export_triton

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.compatibility(
        protocol="Triton", client="tritonserver", version="2.51", feature="an exported repository with Stoker's executor in the real server"
    ),
]

PROMPT = "the quick brown"
START_S = 60.0
OPTIONS = {"decoupled_mode": "true", "max_tokens_in_paged_kv_cache": "4096", "max_beam_width": "2"}


class Real:
    """A running server and the engine that it serves."""

    def __init__(self, ports: tuple[int, int, int], engine: Path, process: subprocess.Popen[bytes]) -> None:
        self.http, self.grpc = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
        self.metrics = f"http://127.0.0.1:{ports[2]}/metrics"
        self.engine = engine
        self.process = process

    def count(self, name: str, model: str) -> float:
        exposition = httpx.get(self.metrics).text
        return float(re.search(rf'^{name}{{model="{model}",version="1"}} (\S+)$', exposition, re.M)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    checkpoint = tiny.save(tiny.model(max_position_embeddings=1024), tmp_path_factory.mktemp("checkpoint"))
    limits = Limits(max_batch_size=8, max_input_len=64, max_output_len=512, max_num_tokens=256, max_beam_width=2, tokens_per_block=16)
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build(checkpoint, out, BuildConfig(dtype="float32", limits=limits), verify="files")
    return out


@pytest.fixture(scope="module")
def server(engine: Path, script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    scripts = script("real_triton")
    try:
        installed = scripts.RealTriton.installed()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{scripts.PACKAGE} cannot be installed (a package registry is needed): {error}")
    repository, second = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("second")
    info = EngineInfo(path=str(engine), architecture="LlamaForCausalLM", vocab_size=320)
    export_triton(info, repository, OPTIONS)
    export_triton(info, second, OPTIONS)
    keep_one_model(second, "tensorrt_llm", "another_llm")
    ports = free_port(), free_port(), free_port()
    log = tmp_path_factory.mktemp("log") / "triton.log"
    command = installed.command([repository, second], ports, f"stoker{os.getpid()}_")
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=installed.environment(), stdout=file, stderr=file, start_new_session=True)
        try:
            wait_ready(process, ports[0], log)
            yield Real(ports, engine, process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                for region in Path("/dev/shm").glob(f"stoker{os.getpid()}_*"):  # not removed by a model that did not end in time
                    region.unlink()


def keep_one_model(repository: Path, model: str, name: str) -> None:
    """Delete all other models of a repository, and rename `model` to `name`."""
    for folder in list(repository.iterdir()):
        if folder.name != model:
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            folder.rmdir()
    config = (repository / model).rename(repository / name) / "config.pbtxt"
    config.write_text(config.read_text().replace(f'name: "{model}"', f'name: "{name}"', 1))


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


@pytest.fixture(scope="module")
def whole(engine: Path) -> str:
    """PROMPT and the engine's text after it, with end tokens ignored. REQUEST has an end id that is never generated, so it is equal."""
    with LLM(engine, device="cpu", kv_cache_tokens=4096) as llm:
        done = llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
        return llm.tokenizer.decode([*done.prompt_token_ids, *done.choices[0].token_ids])


REQUEST: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 24, "end_id": 319}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_whole_answers(server: Real, whole: str, model: str) -> None:
    with Stream(server) as stream:
        stream.send(model, **REQUEST, empty_final=True)
        results = stream.rest()
    assert [text(result) for result in results if result.get_response().outputs] == [whole]
    answer = httpx.post(f"http://{server.http}/v2/models/{model}/generate", json=REQUEST, timeout=30)
    assert answer.json()["text_output"] == whole


def test_streamed_answers(server: Real, whole: str) -> None:
    with Stream(server) as stream:
        stream.send("tensorrt_llm_bls", **REQUEST, stream=True, empty_final=True)
        parts = [text(result) for result in stream.rest() if result.get_response().outputs]
        assert "".join(parts).rstrip("\ufffd") == whole.removeprefix(PROMPT).rstrip("\ufffd") and len(parts) == 24
        stream.send("ensemble", **REQUEST, stream=True, empty_final=True)
        parts = [text(result) for result in stream.rest() if result.get_response().outputs]
    assert len(parts) == 24
    assert "".join(parts).replace("\ufffd", "") == whole.removeprefix(PROMPT).replace("\ufffd", "")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_beams_and_reuse_statistics(server: Real, engine: Path, model: str) -> None:
    with LLM(engine, device="cpu", kv_cache_tokens=4096) as llm:
        params = SamplingParams(max_tokens=6, n=2, beam_width=2, ignore_eos=True)
        done = llm.generate(PROMPT, params)
        texts = [llm.tokenizer.decode([*done.prompt_token_ids, *choice.token_ids]) for choice in done.choices]
    with Stream(server) as stream:
        stream.send(model, **{**REQUEST, "max_tokens": 6}, beam_width=2, return_kv_cache_reuse_stats=True, empty_final=True)
        (result,) = [result for result in stream.rest() if result.get_response().outputs]
    assert [item.decode() for item in result.as_numpy("text_output")] == texts
    assert result.as_numpy("cum_log_probs").shape == (1, 2)
    blocks = [result.as_numpy(f"kv_cache_{name}_blocks").tolist() for name in ("reused", "alloc_total", "alloc_new")]
    assert all(len(value) == 1 and len(value[0]) == 1 for value in blocks) and blocks[0][0][0] + blocks[1][0][0] == 1


def test_two_engines_and_the_ensemble_at_once(server: Real, whole: str) -> None:
    ids = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 20}
    with Stream(server) as stream:
        for i in range(4):
            for model in ("tensorrt_llm", "another_llm"):
                stream.send(model, f"{model}{i}", **ids, streaming=True, empty_final=True)
            stream.send("ensemble", f"ensemble{i}", **REQUEST, empty_final=True)
        answers: dict[str, list[Any]] = {}
        left = 12
        while left:
            result = stream.next()
            response = result.get_response()
            left -= response.parameters["triton_final_response"].bool_param
            if response.outputs:
                answers.setdefault(response.id, []).append(result)
    tokens = {name: [r.as_numpy("output_ids").item() for r in found] for name, found in answers.items() if "ensemble" not in name}
    assert len(tokens) == 8 and all(found == tokens["tensorrt_llm0"] and len(found) == 20 for found in tokens.values())
    assert [text(answers[f"ensemble{i}"][0]) for i in range(4)] == [whole] * 4


def test_a_cancelled_stream_frees_the_executor(server: Real) -> None:
    """Eight requests fill the batch. A ninth is answered soon only if their rows are free."""
    inputs = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 500}
    stream = Stream(server)
    for i in range(8):
        stream.send("tensorrt_llm", f"long{i}", **inputs, streaming=True)
    stream.next()
    before = time.monotonic()
    stream.client.stop_stream(cancel_requests=True)
    with Stream(server) as other:
        other.send("tensorrt_llm", "short", **{**inputs, "request_output_len": 4}, streaming=True, empty_final=True)
        assert len([r for r in other.rest() if r.get_response().outputs]) == 4
    assert time.monotonic() - before < 2.0
    deadline = time.monotonic() + 10
    while server.count("nv_inference_pending_request_count", "tensorrt_llm") > 0:
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"beam_width": 3}, "beam_width=3 is refused"), ({"max_tokens": 600}, "max_output_len is 512"), ({"text_input": "a" * 500}, "prompt")],
)
def test_error_messages_reach_the_client(server: Real, changed: dict[str, Any], message: str) -> None:
    with Stream(server) as stream:
        for model in ("ensemble", "tensorrt_llm_bls"):
            stream.send(model, **{**REQUEST, **changed}, empty_final=True)
            with pytest.raises(InferenceServerException, match=message):
                stream.rest()


def test_the_http_client(server: Real) -> None:
    """preprocessing and postprocessing over HTTP."""
    import tritonclient.http as thttp

    client = thttp.InferenceServerClient(server.http)
    done = client.infer("preprocessing", tensors(thttp, QUERY=PROMPT, REQUEST_OUTPUT_LEN=3, STOP_WORDS_DICT=["dog"]), request_id="r")
    assert done.get_response()["id"] == "r" and done.as_numpy("STOP_WORDS_IDS").shape[:2] == (1, 2)
    after = client.infer(
        "postprocessing", tensors(thttp, TOKENS_BATCH=done.as_numpy("INPUT_ID")[None], SEQUENCE_LENGTH=done.as_numpy("REQUEST_INPUT_LEN"))
    )
    assert text(after, "OUTPUT") == PROMPT
    client.close()
