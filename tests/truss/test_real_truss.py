"""An exported Truss, loaded and run by the real truss package, compared with `stoker serve` of the same folder.

The oracle is the same engine in this process. The package is installed once, in its own venv in the cache.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import pytest
from free_ports import free_port
from process_tree import processes_below, runs
from triton_server import until

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.cli.main import main
from stoker.cli.server_process import running_server
from stoker.deploy.truss.keys import TABLE
from stoker.deploy.truss.shape import SECTIONS

pytestmark = [
    pytest.mark.truss,
    pytest.mark.timeout(300),
    pytest.mark.compatibility(
        protocol="Truss", client="truss", version="0.18.35", feature="an exported Truss in the real model server, equal to stoker serve"
    ),
]

PROMPT = "the quick brown"
PREDICT = "/v1/models/model:predict"
START_S = 60.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    folder = tmp_path_factory.mktemp("engine")
    checkpoint = tiny.save(tiny.model(), folder / "checkpoint")
    limits = Limits(max_batch_size=8, max_input_len=64, max_output_len=128, max_num_tokens=128, tokens_per_block=16, max_beam_width=2)
    return build(checkpoint, folder / "tiny", BuildConfig(device="cpu", limits=limits), verify="files").path


@pytest.fixture(scope="module")
def folder(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `stoker export truss` writes."""
    out = tmp_path_factory.mktemp("truss") / "tiny"
    arguments = ["stoker", "export", "truss", str(engine), str(out), "--accelerator", "none", "--set", "max_tokens_in_paged_kv_cache:4096"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        assert main() == 0
    return out


def test_every_field_of_a_config_is_known(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Each field of TrussConfig and of its models has a row, is a section of rows, or is inside a row that accepts anything."""
    try:
        installed = script("real_truss").RealTruss.installed()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"truss cannot be installed (a package registry is needed): {error}")
    program = Path(__file__).parent / "list_truss_fields.py"
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""}
    listed = subprocess.run([installed.python, program], capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert len(listed) > 150 and "trt_llm.build.speculator.lookahead_ngram_size" in listed
    parents = [[".".join(path.split(".")[: length + 1]) for length in range(path.count(".") + 1)] for path in listed]
    assert [names[-1] for names in parents if names[-1] not in SECTIONS and not any(name in TABLE for name in names)] == []


class Real:
    """The real server and the Stoker server that its model.py started."""

    def __init__(self, url: str, log: Path) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)
        self.log = log


@pytest.fixture(scope="module")
def real(folder: Path, script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    scripts = script("real_truss")
    try:
        installed = scripts.RealTruss.installed()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{scripts.PACKAGE} cannot be installed (a package registry is needed): {error}")
    work = tmp_path_factory.mktemp("real")
    installed.write_app(folder, work / "app")
    port = free_port()
    log = work / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [installed.python, "main.py"],
            cwd=work / "app",
            env=installed.environment(port),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        server = Real(f"http://127.0.0.1:{port}", log)
        try:
            wait_ready(process, server)
            started = processes_below(process.pid)
            yield server
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            assert len(started) > 3
            until(lambda: not any(map(runs, started)), seconds=50)  # the servers of truss and of Stoker, and their processes
        finally:
            try:
                process.kill()
                process.wait(20)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                server.client.close()


def wait_ready(process: subprocess.Popen[bytes], real: Real) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if real.client.get("/v1/models/model").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(real.log.read_text(errors="replace")[-4000:])


@pytest.fixture(scope="module")
def own(folder: Path) -> Iterator[httpx.Client]:
    """`stoker serve` of the same folder."""
    with running_server(folder) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def expected_text(engine: Path) -> str:
    with LLM(engine, device="cpu", kv_cache_tokens=4096) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True)).choices[0].text


BODIES: list[dict[str, Any]] = [
    {"max_tokens": 24, "ignore_eos": True},
    {"max_tokens": 24, "ignore_eos": True, "stream": False},
    {},
    {"max_tokens": 20, "beam_width": 2},
    {"max_tokens": 20, "beam_width": 2, "stream": False},
    {"max_tokens": 30, "repetition_penalty": 1.8},
    {"max_tokens": 30, "temperature": 0.9, "random_seed": 7},
    {"max_tokens": 30, "bad_words_list": ["a", "e"], "stop_words_list": ["t"]},
]


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_both_servers_respond_equally(real: Real, own: httpx.Client, expected_text: str, body: dict[str, Any]) -> None:
    answers = [client.post(PREDICT, json={"prompt": PROMPT, **body}) for client in (real.client, own)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content and answers[0].content
    assert answers[0].headers["content-type"] == answers[1].headers["content-type"]
    if body == BODIES[0]:
        assert answers[0].text.rstrip("\ufffd") == expected_text.rstrip("\ufffd")
    if body == BODIES[1]:
        assert answers[0].json()["text"].rstrip("\ufffd") == expected_text.rstrip("\ufffd")


@pytest.mark.parametrize("accept", [{}, {"accept": "application/json"}])
def test_conversations(real: Real, own: httpx.Client, accept: dict[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answers = [client.post(PREDICT, json=body, headers={"accept": "*/*", **accept}) for client in (real.client, own)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].content and answers[0].content == answers[1].content
    assert answers[0].headers["content-type"] == answers[1].headers["content-type"]


def test_a_stream_has_several_chunks(real: Real) -> None:
    """Where the processes share a core, all chunks of an answer may arrive before the client reads: then the request is repeated."""
    counts: list[int] = []
    while max(counts, default=0) <= 3 and len(counts) < 20:
        with real.client.stream("POST", PREDICT, json={"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}) as answer:
            counts.append(len(list(answer.iter_raw())))
    assert max(counts) > 3


def test_openai_through_model_py(real: Real, own: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    choices = [client.post("/v1/completions", json=body).json()["choices"] for client in (real.client, own)]
    assert choices[0] == choices[1]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    streamed = real.client.post("/v1/chat/completions", json=chat, headers={"accept": "text/event-stream"})
    assert streamed.text.startswith("data: ") and streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body, message", [
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens=0 is refused"), ({"prompt": PROMPT, "max_tokens": 5000}, "max_output_len"),
    ({"prompt": PROMPT, "beam_width": 3}, "beam_width=3 is refused"), ({"prompt": PROMPT, "speed": 1}, "speed=1 is refused"),
    ({"prompt": "a" * 400}, "prompt"), ({"temperature": 1}, "prompt"), ([], "object"),
    ({"prompt": PROMPT, "min_p": 2}, "min_p=2 is refused"), ({"prompt": PROMPT, "seed": "x"}, "seed='x' is refused"),
])  # fmt: skip
def test_invalid_bodies_get_status_400_from_both(real: Real, own: httpx.Client, body: Any, message: str) -> None:
    answers = [client.post(PREDICT, json=body) for client in (real.client, own)]
    assert answers[0].content == answers[1].content and message in answers[0].json()["error"]
    for answer in answers:
        assert (answer.status_code, answer.headers["x-baseten-error-code"]) == (400, "700")


def test_msgpack(real: Real, own: httpx.Client) -> None:
    body, headers = (
        msgspec.msgpack.encode({"prompt": PROMPT, "max_tokens": 8, "stream": False}),
        {"content-type": "application/octet-stream"},
    )
    path = "/v1/models/model:predict_binary"
    answers = [client.post(path, content=body, headers=headers) for client in (real.client, own)]
    assert answers[0].status_code == 200 and answers[0].content == answers[1].content
    assert isinstance(msgspec.msgpack.decode(answers[0].content)["text"], str)


def test_disconnected_clients_free_their_rows(real: Real) -> None:
    """After sixteen abandoned long streams, a short request does not wait for them."""
    body = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True}
    for _ in range(16):
        with real.client.stream("POST", PREDICT, json=body) as answer:
            next(answer.iter_raw())
    assert real.client.post(PREDICT, json={"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}).status_code == 200


def test_many_at_once(real: Real, expected_text: str) -> None:
    texts: list[str] = []

    def post() -> None:
        texts.append(real.client.post(PREDICT, json={"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}).text)

    threads = [threading.Thread(target=post) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 16 and set(texts) == {texts[0]} and texts[0].rstrip("\ufffd") == expected_text.rstrip("\ufffd")


def test_routes_of_a_truss(real: Real, own: httpx.Client) -> None:
    for path in ("/", "/ping", "/v1/models/model", "/v1/models/model/loaded", "/v1/models/model/schema", "/nothing"):
        answers = [client.get(path) for client in (real.client, own)]
        assert answers[0].status_code == answers[1].status_code and answers[0].content == answers[1].content
    for path in ("/v1/embeddings", "/v1/messages", "/v1/responses"):
        answers = [client.post(path, json={"input": 3}) for client in (real.client, own)]
        assert answers[0].status_code == answers[1].status_code and answers[0].content == answers[1].content, path
