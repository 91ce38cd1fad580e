"""`stoker route` in front of two servers with engines: block events, tokens of all protocols, and reuse of prefixes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from live_http import live_app

from stoker.base import env
from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.router.core.prefix import token_prefix
from stoker.router.proxy.application import RouterApplication
from stoker.router.settings import RouterSettings
from stoker.server.settings import ServerSettings

SERVE = """
import json, sys
from stoker.base.config import RuntimeConfig
from stoker.server.processes.supervisor import serve
from stoker.server.settings import ServerSettings
runtime = RuntimeConfig(device="cpu", kv_cache_tokens=2048, num_threads=1, kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*")
serve(sys.argv[1], runtime, ServerSettings(http_port=0, model_name="tiny"), lambda line: print(line, flush=True))
"""
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
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
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env.child_environment(STOKER_LOG="warning")) for _ in range(2)
    ]
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


async def test_events_of_replicas_have_the_hashes_that_the_router_computes(servers: list[str], engine: Path) -> None:
    """A second router, which starts later, knows the blocks from a replay, and chooses the same replicas."""
    settings = RouterSettings(replicas=tuple(servers), tokenizer=str(engine), health_interval_s=0.1, tokenize_timeout_s=30.0)
    first, second = RouterApplication(settings), RouterApplication(settings)
    chosen: list[str] = []
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
                prefix = await first.prefix(
                    "POST", path, [(b"content-type", b"application/json")], json.dumps({**body, **limit}).encode(), {}
                )
                assert prefix.exact and len(prefix.hashes) >= 2, path
                masks = first.router.fleet.stored.masks
                await _until(lambda hashes=prefix.hashes, masks=masks: all(value in masks for value in hashes))
                holder = next(replica for replica in first.router.fleet if masks[prefix.hashes[-1]] >> replica.slot & 1)
                chosen.append(holder.name)
            await second.open()
            stack.push_async_callback(second.close)
            total = sum(first.router.fleet.stored.num_blocks(replica.slot) for replica in first.router.fleet)
            await _until(lambda: sum(second.router.fleet.stored.num_blocks(replica.slot) for replica in second.router.fleet) == total)
            assert second.router.fleet.stored.masks.keys() == first.router.fleet.stored.masks.keys()
            salted = token_prefix(list(range(3, 60)), 16, "tenant")
            assert salted.hashes[-1] in second.router.fleet.stored.masks and len(set(chosen)) == 2
        async with live_app(second, ServerSettings()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            path, body = PROMPTS[0]
            answer = (await client.post(path, json={**body, "max_tokens": 1})).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0


async def _until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
