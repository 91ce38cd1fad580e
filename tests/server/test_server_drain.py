"""Requests that are still running when the drain time ends: each protocol answers with its own error, or with an error event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from live_http import live_app
from small_tokenizers import small
from test_server_processes import MANY, metric, serve
from tritonclient.utils import InferenceServerException

from stoker.base.config import Limits
from stoker.base.errors import UnavailableError
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorInfo, Submit
from stoker.runtime.request import SequenceOutput
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredService
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.grpc.server import make_grpc_server
from stoker.server.settings import ServerSettings

REASON = "The server is stopping, and the request was still running after 30 s."
MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class HeldServer:
    """All protocols with an executor that generates one token of each request and then nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        limits = Limits(max_input_len=64, max_output_len=64)
        self.mailbox = InProcessMailbox(
            ExecutorInfo(limits=limits, max_seq_len=128, vocab_size=tokenizer.vocab_size, device="cpu", kv_cache_tokens=4096, model="Held")
        )
        self.service = GenerationService("tiny", tokenizer, InProcessClient(self.mailbox))
        self._token = tokenizer.encode("a", add_special_tokens=False)[0]

    async def run(self, num_requests: int) -> None:
        """Receive this number of requests, and generate one token of each."""
        while num_requests:
            requests = [message.request for message in self.mailbox.poll(0) if isinstance(message, Submit)]
            self.mailbox.send([SequenceOutput(request.request_id, 0, [self._token]) for request in requests])
            num_requests -= len(requests)
            await asyncio.sleep(0.001)

    def end(self) -> None:
        self.service.end_requests(UnavailableError(REASON, cure="Send it again."))


@contextlib.asynccontextmanager
async def held_server() -> AsyncIterator[tuple[HeldServer, httpx.AsyncClient, str]]:
    """The server, a client of its HTTP port, and the address of its gRPC port."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    held = HeldServer(Tokenizer(small("byte_level"), config, {"eos_token_id": [2]}))
    repository, counts = ModelRepository(), FrontendMetrics()

    async def load() -> Service:
        return MeteredService(held.service, counts)

    async def unload(service: Service) -> None:
        await held.service.close()

    repository.register("tiny", load, unload)
    await repository.load("tiny")
    context = Context(repository, ServerSettings(), counts)
    grpc = make_grpc_server(context, "127.0.0.1:0")
    await grpc.start()
    try:
        async with live_app(make_app(context), context.settings) as port, httpx.AsyncClient(timeout=30) as client:
            client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
            yield held, client, f"127.0.0.1:{grpc.port}"
    finally:
        await grpc.stop(None)
        await repository.unload("tiny")


def inputs(values: dict[str, list[Any]]) -> list[triton.InferInput]:
    found = []
    for name, value in values.items():
        array = np.array([value], dtype=object if isinstance(value[0], str) else bool if isinstance(value[0], bool) else np.int32)
        kind = "BYTES" if array.dtype == object else "BOOL" if array.dtype == bool else "INT32"
        found.append(triton.InferInput(name, list(array.shape), kind))
        found[-1].set_data_from_numpy(array)
    return found


INFER = {
    "inputs": [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hi"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [20]},
    ]
}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 20},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 20},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 20},
    "/api/generate": {"model": "tiny", "prompt": "Hi"},
    "/api/chat": {"model": "tiny", "messages": MESSAGES},
    "/v2/models/ensemble/generate": {"text_input": "Hi", "max_tokens": 20},
    "/v2/models/ensemble/infer": INFER,
    "/invocations": {"inputs": "Hi", "parameters": {"max_new_tokens": 20}},
    "/v1/models/tiny:predict": {"prompt": "Hi", "max_tokens": 20},
}


def message_of(path: str, body: Any) -> str:
    """The message in the error format of the protocol to which the path belongs."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["error"]["type"] == "overloaded_error"
    if path == "/invocations":
        assert body["code"] == 503
    return str(body["error"]["message"] if path.startswith("/v1/") and not path.endswith(":predict") else body["error"])


async def test_whole_responses_end_with_503_in_the_format_of_the_protocol() -> None:
    async with held_server() as (held, client, address), triton.InferenceServerClient(address) as grpc:
        whole = {path: {**body, "stream": False} if "/infer" not in path else body for path, body in CALLS.items()}
        calls = [asyncio.create_task(client.post(path, json=body)) for path, body in whole.items()]
        infer = asyncio.create_task(grpc.infer("ensemble", inputs({"text_input": ["Hi"], "max_tokens": [20]})))
        await asyncio.wait_for(held.run(len(calls) + 1), 20)
        held.end()
        for path, response in zip(whole, await asyncio.gather(*calls), strict=True):
            assert response.status_code == 503, (path, response.text)
            # Truss names no reason: every 503 has this message.
            expected = "Model with name model is not ready." if path.endswith(":predict") else REASON
            assert expected in message_of(path, response.json()), (path, response.text)
        with pytest.raises(InferenceServerException, match=REASON) as error:
            await infer
        assert error.value.status() == "StatusCode.UNAVAILABLE"
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=CALLS["/v1/completions"])).status_code == 503


async def test_streams_end_with_an_error_event() -> None:
    streams = {path: {**body, "stream": True} for path, body in CALLS.items() if "/v2/" not in path}
    streams["/v2/models/ensemble/generate_stream"] = {**CALLS["/v2/models/ensemble/generate"], "stream": True}
    async with (
        held_server() as (held, client, address),
        triton.InferenceServerClient(address) as grpc,
        contextlib.AsyncExitStack() as stack,
    ):

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "ensemble", "inputs": inputs({"text_input": ["Hi"], "max_tokens": [20], "stream": [True]})}

        pushed = grpc.stream_infer(requests())
        first = asyncio.create_task(anext(aiter(pushed)))
        opened = [asyncio.create_task(stack.enter_async_context(client.stream("POST", path, json=body))) for path, body in streams.items()]
        await asyncio.wait_for(held.run(len(opened) + 1), 20)
        responses = await asyncio.gather(*opened)
        assert (await first)[1] is None
        held.end()
        for path, response in zip(streams, responses, strict=True):
            text = (await response.aread()).decode()
            assert response.status_code == 200 and REASON in text, (path, text)
            assert '"finish_reason":"stop"' not in text and '"status":"completed"' not in text, (path, text)
        _, error = await anext(aiter(pushed))
        assert REASON in str(error)


async def queued(client: httpx.AsyncClient) -> float:
    """The number of waiting sequences; 0 while the executor, which admits hundreds of them, has not answered a query yet."""
    has_answered = "stoker_queue_size{" in (await client.get("/metrics")).text
    return await metric(client, "stoker_queue_size") if has_answered else 0.0


async def test_a_server_whose_drain_time_ends(engine: Path, tmp_path: Path) -> None:
    """Real processes: a stopped executor ends no request, so all of them are running when the drain time ends."""
    async with serve(engine, tmp_path, drain_timeout_s=0.2) as served, httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        prompts = MANY["prompt"]
        body = {**MANY, "prompt": prompts[:100], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            whole = asyncio.create_task(client.post("/v1/completions", json={**MANY, "prompt": prompts[:120]}))
            async with asyncio.timeout(20):
                while await queued(client) <= 400:
                    await asyncio.sleep(0.002)
            (executor,) = served.children("stoker.server.processes.executor")
            os.kill(executor, signal.SIGSTOP)
            served.process.terminate()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "unavailable", rest[-2]
        assert (await whole).status_code == 503 and "The server is stopping" in (await whole).json()["error"]["message"]
        os.kill(executor, signal.SIGCONT)
        assert await served.ended() == 0
    logged = [line for line in served.lines() if "stopping; requests in flight" not in line]
    assert len([line for line in logged if "drain_timeout_s=0.2 is over; 2 HTTP requests and " in line]) == 1
    assert not any("Traceback" in line or "failed" in line for line in logged), logged
