"""`stoker route` in front of two servers with engines: block events, tokens of all protocols, and reuse of prefixes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
import tritonclient.grpc.aio as triton
from live_http import live_app
from tritonclient.utils import InferenceServerException

from stoker.base import env
from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.router.core.policy import Route
from stoker.router.core.prefix import PromptPrefix, token_prefix
from stoker.router.core.settings import RoutingSettings
from stoker.router.proxy.application import RouterApplication
from stoker.router.proxy.grpc import make_grpc_server
from stoker.router.settings import RouterSettings
from stoker.runtime.transfer.ticket import make_tickets
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.replica_report import deployment_of
from stoker.server.settings import ServerSettings

SERVE = """
import json, sys
from stoker.base.config import RuntimeConfig
from stoker.server.processes.supervisor import serve
from stoker.server.settings import ServerSettings
runtime = RuntimeConfig(device="cpu", kv_cache_tokens=2048, num_threads=1, kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*",
    transfer="127.0.0.1:0", transfer_backend="tcp")
serve(sys.argv[1], runtime, ServerSettings(http_port=0, grpc_port=0, model_name="tiny"), lambda line: print(line, flush=True))
"""
SECRET = "a shared secret of these tests"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
JSON = [(b"content-type", b"application/json")]
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The quick brown fox jumps over the lazy dog. " * 4}),
    ("/v1/completions", {"prompt": list(range(3, 60)), "cache_salt": "tenant"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me about the quick brown fox and the lazy dog, please."}]}),
    ("/v1/responses", {"input": "Tell me about the quick brown fox and the lazy dog, please. " * 2, "store": False}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "A very lazy dog and a quick fox were friends."}]}),
    ("/api/generate", {"model": "tiny", "prompt": "A very lazy dog and a quick fox were friends, said Ollama. " * 2, "stream": False}),
    ("/v2/models/ensemble/generate", {"text_input": "Friends of the lazy dog and of the fox met at Triton's. " * 3}),
    ("/invocations", {"inputs": "Friends of the dog and of the fox met at a container's. " * 3, "parameters": {"max_new_tokens": 1}}),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tiny.save(tiny.model(), tmp_path_factory.mktemp("checkpoint"))
    config = json.loads((checkpoint / "tokenizer_config.json").read_text()) if (checkpoint / "tokenizer_config.json").exists() else {}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    limits = Limits(max_batch_size=8, max_input_len=240, max_output_len=16, max_num_tokens=240, tokens_per_block=16)
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build(checkpoint, out, BuildConfig(dtype="float32", limits=limits), verify="files")
    return out


@pytest.fixture(scope="module")
def servers(engine: Path) -> Iterator[list[str]]:
    """The URLs of two servers."""
    command = [sys.executable, "-c", SERVE, str(engine)]
    variables = env.child_environment(STOKER_LOG="warning", STOKER_CLUSTER_TOKEN=SECRET)
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(2)]
    try:
        urls = []
        for process in started:
            assert process.stdout is not None
            line = process.stdout.readline()
            urls.append(next(word for word in line.split() if word.startswith("http")))
        yield urls
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]


async def test_events_of_replicas_have_the_hashes_that_the_router_computes(
    servers: list[str], engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second router, which starts later, knows the blocks from a replay, and chooses the same replicas."""
    logging.getLogger("stoker").propagate = True
    caplog.set_level(logging.INFO, "stoker")
    settings = RouterSettings(replicas=tuple(servers), tokenizer=str(engine), health_interval_s=0.1, tokenize_timeout_s=30.0)
    first, second = RouterApplication(settings), RouterApplication(settings)
    prefixes: list[PromptPrefix] = []
    async with contextlib.AsyncExitStack() as stack:
        await first.open()
        stack.push_async_callback(first.close)
        async with live_app(first, ServerSettings()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for path, body in PROMPTS:
                limit = (
                    {} if path in ("/invocations", "/api/generate") else {"max_output_tokens" if "responses" in path else "max_tokens": 1}
                )
                answer = await client.post(path, json={**body, **limit})
                assert answer.status_code == 200, answer.text
                prefix = await first.prefix("POST", path, JSON, json.dumps({**body, **limit}).encode(), {})
                assert prefix.exact and len(prefix.hashes) >= 2, path
                await _until(lambda hashes=prefix.hashes: all(value in first.router.fleet.stored.masks for value in hashes))
                prefixes.append(prefix)
            for url in servers:  # whatever the consistent hashing has chosen, both replicas publish blocks
                body = {"prompt": f"Only {url} has seen this prompt. " * 2, "max_tokens": 1}
                answer = await client.post(f"{url}/v1/completions", json=body)
                prefix = await first.prefix("POST", "/v1/completions", JSON, json.dumps(body).encode(), {})
                await _until(lambda hashes=prefix.hashes: all(value in first.router.fleet.stored.masks for value in hashes))
                decision = first.router.choose(Route(prefix=prefix))
                assert decision is not None and (decision.replica.name, decision.num_cached) == (url, len(prefix.hashes) * 16)
                prefixes.append(prefix)
            await second.open()
            stack.push_async_callback(second.close)
            total = sum(first.router.fleet.stored.num_blocks(replica.slot) for replica in first.router.fleet)
            await _until(lambda: sum(second.router.fleet.stored.num_blocks(replica.slot) for replica in second.router.fleet) == total)
            assert second.router.fleet.stored.masks.keys() == first.router.fleet.stored.masks.keys()
            salted = token_prefix(list(range(3, 60)), 16, "tenant")
            assert salted.hashes[-1] in second.router.fleet.stored.masks
            for prefix in prefixes:
                choices = [application.router.choose(Route(prefix=prefix)) for application in (first, second)]
                assert len({(choice.replica.name, choice.num_cached) for choice in choices if choice is not None}) == 1
        async with live_app(second, ServerSettings()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            path, body = PROMPTS[0]
            answer = (await client.post(path, json={**body, "max_tokens": 1})).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0
    names = [record.name for record in caplog.records]  # a line for each request, from the router
    assert names.count("stoker.router.access") == len(PROMPTS) + 1 and "stoker.access" not in names


async def _until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [3 + i * 7 % 300 for i in range(200)], "max_tokens": 8, "temperature": 0.8, "seed": 5, "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Two servers share this prompt. " * 5}], "max_tokens": 8, "temperature": 0},
    ),
    (
        "/v1/messages",  # its default temperature is 1, with which the first token may end the answer
        {"messages": [{"role": "user", "content": "Another prompt of two servers. " * 5}], "max_tokens": 8, "temperature": 0},
    ),
]


async def test_one_server_computes_prompts_and_another_one_answers(
    servers: list[str], engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers equal those of one server, and each prompt was transferred once. Tickets that the router did not sign are refused."""
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", SECRET)
    settings = RouterSettings(
        replicas=tuple(servers), tokenizer=str(engine), tokenize_timeout_s=30.0, routing=RoutingSettings(disaggregate_tokens=64)
    )
    router = RouterApplication(settings)
    await router.open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        port = await stack.enter_async_context(live_app(router, ServerSettings()))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        answers = [(await client.post(f"http://127.0.0.1:{port}{path}", json=body)).json() for path, body in REQUESTS]
        streamed = await client.post(
            f"http://127.0.0.1:{port}/v1/completions", json={"prompt": list(range(9, 209)), "max_tokens": 4, "stream": True}
        )
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
        counts = [await metrics_of(client, url) for url in servers]
        assert sum(count["stoker_kv_imports_total"] for count in counts) == 4
        assert sum(count["stoker_kv_exports_total"] for count in counts) == 4
        assert sum(count["stoker_kv_failed_imports_total"] + count["stoker_kv_failed_exports_total"] for count in counts) == 0
        assert sum(count["stoker_kv_imported_bytes_total"] for count in counts) > 4 * 64 * 384
        alone = [(await client.post(f"{servers[0]}{path}", json={**body, "cache_salt": "alone"})).json() for path, body in REQUESTS]
        for answer, expected in zip(answers[:2], alone, strict=False):
            assert [choice.get("text") or choice["message"] for choice in answer["choices"]] == [
                choice.get("text") or choice["message"] for choice in expected["choices"]
            ]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        assert answers[2]["content"] == alone[2]["content"] and answers[2]["content"][0]["text"]
        forged = make_tickets("127.0.0.1", 9, b"another key")[1]
        refused = await client.post(f"{servers[0]}/v1/completions", json={"prompt": "a"}, headers={"x-stoker-transfer": forged})
        assert refused.status_code == 400 and "signature" in refused.text


async def test_prompts_of_grpc_calls_are_computed_by_another_server(
    servers: list[str], engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call and a stream. Their answers equal those of one server, and a client cannot choose a transfer."""
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", SECRET)
    disaggregated = RoutingSettings(disaggregate_tokens=64)
    settings = RouterSettings(replicas=tuple(servers), tokenizer=str(engine), tokenize_timeout_s=30.0, routing=disaggregated)
    router = RouterApplication(settings)
    await router.open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        server, proxy = make_grpc_server(router, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(proxy.close)
        stack.push_async_callback(server.stop, 0)
        client = await stack.enter_async_context(triton.InferenceServerClient(f"127.0.0.1:{server.port}"))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        before = [await metrics_of(http, url) for url in servers]
        called = await client.infer("ensemble", inputs("A prompt of two servers and gRPC. " * 4), headers={"x-stoker-transfer": "forged"})
        texts = [called.as_numpy("text_output").reshape(-1)[0].decode()]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "ensemble", "inputs": inputs("A stream of two servers and gRPC. " * 4)}

        async for result, error in client.stream_infer(requests()):
            assert error is None
            texts.append(result.as_numpy("text_output").reshape(-1)[0].decode())
        after = [await metrics_of(http, url) for url in servers]
        for name, count in (("imports", 2), ("exports", 2), ("failed_imports", 0), ("failed_exports", 0)):
            metric = f"stoker_kv_{name}_total"
            assert sum(new[metric] - old[metric] for old, new in zip(before, after, strict=True)) == count, name
        prompts = ["A prompt of two servers and gRPC. " * 4, "A stream of two servers and gRPC. " * 4]
        bodies = [{"text_input": text, "max_tokens": 8} for text in prompts]
        alone = [(await http.post(f"{servers[0]}/v2/models/ensemble/generate", json=body)).json()["text_output"] for body in bodies]
        assert texts == alone
        report = (await http.get(f"{servers[0]}/health/replica")).json()
        direct = await stack.enter_async_context(triton.InferenceServerClient(f"127.0.0.1:{report['grpc_port']}"))
        with pytest.raises(InferenceServerException, match="signature"):
            await direct.infer("ensemble", inputs("a"), headers={"x-stoker-transfer": "forged"})


def inputs(text: str) -> list[Any]:
    values = [("text_input", np.array([[text.encode()]], dtype=object), "BYTES"), ("max_tokens", np.array([[8]], dtype=np.int32), "INT32")]
    made = [triton.InferInput(name, list(value.shape), dtype) for name, value, dtype in values]
    for tensor, (_, value, _) in zip(made, values, strict=True):
        tensor.set_data_from_numpy(value)
    return made


async def metrics_of(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """The values of a server's metrics, without labels."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if line.startswith("stoker_kv")}


def test_the_router_tokenizes_for_plain_engines_only() -> None:
    """`stoker serve ENGINE` has options for the KServe models of an engine without a repository; these do not change prompts."""
    assert deployment_of(None) == deployment_of(TritonOptions(unary=True)) == ""
    assert deployment_of(TritonOptions()) == "TritonOptions"
