"""Large requests do not occupy the event loop: the work on its thread does not grow with the body.

Work is measured as calls of functions (also C functions) on the thread of the event loop, which `sys.setprofile` reports for one thread.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import httpx
import msgspec
import pytest
from live_http import asgi_client
from scripted_service import ScriptedService

from stoker.server.http.json_body import INLINE_BYTES
from stoker.server.protocols.openai.prompts import MAX_IDS
from stoker.server.protocols.openai.responses.store import ResponseStore

JSON = {"content-type": "application/json"}
NUM_IDS = 200_000
NUM_CHARS = 2 << 20
MAX_MORE_CALLS = 4000  # for threads, and for the parts of a body; one call per id or per character would be far more
LIMITS = {"max_input_len": 1 << 20, "max_output_len": 1 << 10, "max_num_tokens": 1 << 20}


class Calls:
    """Counts the calls of the present thread while it is active."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def ids(count: int) -> list[int]:
    return [97] * count


def call_arguments(count: int) -> list[dict[str, Any]]:
    """A conversation with a call whose arguments are JSON text of this size."""
    arguments = json.dumps({"values": ids(count // 4)})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]


def tensor(name: str, shape: list[int], data: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": shape, "data": data}


def inference_inputs(count: int) -> list[dict[str, Any]]:
    lengths = [tensor("input_lengths", [1, 1], [count]), tensor("request_output_len", [1, 1], [1])]
    return [tensor("input_ids", [1, count], ids(count)), *lengths]


def tokens_batch(count: int) -> list[dict[str, Any]]:
    return [tensor("TOKENS_BATCH", [1, 1, count], ids(count)), tensor("SEQUENCE_LENGTH", [1, 1], [count])]


BODIES: dict[str, tuple[str, Callable[[float], bytes]]] = {  # name → (path, body of a size from 0 to 1)
    "completion of ids": ("/v1/completions", lambda s: encoded({"prompt": ids(1 + int(s * NUM_IDS)), "max_tokens": 1})),
    "completion of lists": ("/v1/completions", lambda s: encoded({"prompt": [ids(1 + int(s * 4000))] * 50, "max_tokens": 1})),
    "completion with prompt_logprobs": (
        "/v1/completions",
        lambda s: encoded({"prompt": ids(1 + int(s * 20_000)), "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ),
    "completion of text": ("/v1/completions", lambda s: encoded({"prompt": "x" * (1 + int(s * (1 << 19))), "max_tokens": 1})),
    "chat": ("/v1/chat/completions", lambda s: encoded({"messages": [{"role": "user", "content": "x" * (1 + int(s * (1 << 19)))}]})),
    "chat with calls": ("/v1/chat/completions", lambda s: encoded({"messages": call_arguments(int(s * NUM_CHARS))})),
    "tokenize": ("/tokenize", lambda s: encoded({"prompt": "x" * (1 + int(s * (1 << 19))), "return_token_strs": True})),
    "detokenize": ("/detokenize", lambda s: encoded({"tokens": ids(1 + int(s * NUM_IDS))})),
    "responses": ("/v1/responses", lambda s: encoded({"input": "x" * (1 + int(s * (1 << 19))), "max_output_tokens": 1})),
    "messages": (
        "/v1/messages",
        lambda s: encoded({"messages": [{"role": "user", "content": "x" * (1 + int(s * (1 << 19)))}], "max_tokens": 1}),
    ),
    "ollama chat": ("/api/chat", lambda s: encoded({"messages": [{"role": "user", "content": "x" * (1 + int(s * (1 << 19)))}]})),
    "invocations": ("/invocations", lambda s: encoded({"inputs": "x" * (1 + int(s * (1 << 19)))})),
    "generate": ("/v2/models/ensemble/generate", lambda s: encoded({"text_input": "x" * (1 + int(s * (1 << 19))), "max_tokens": 1})),
    "generate of ids": (
        "/v2/models/tensorrt_llm/generate",
        lambda s: encoded({"input_ids": ids(1 + int(s * NUM_IDS)), "input_lengths": 1 + int(s * NUM_IDS), "request_output_len": 1}),
    ),
    "infer of ids": ("/v2/models/tensorrt_llm/infer", lambda s: encoded({"inputs": inference_inputs(1 + int(s * NUM_IDS))})),
    "postprocessing": ("/v2/models/postprocessing/infer", lambda s: encoded({"inputs": tokens_batch(1 + int(s * NUM_IDS))})),
    "predict": ("/v1/models/model:predict", lambda s: encoded({"prompt": "x" * (1 + int(s * (1 << 19)))})),
}


async def measure(client: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, int]:
    """(status, calls on this thread)."""
    with Calls() as calls:
        answer = await client.post(path, content=body, headers=headers)
    return answer.status_code, calls.count


@pytest.fixture
def decoded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the JSON texts that the thread of the event loop decodes."""
    sizes: list[int] = []
    decode, loop_thread = msgspec.json.decode, threading.get_ident()

    def recording(data: Any, **options: Any) -> Any:
        if threading.get_ident() == loop_thread:
            sizes.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(msgspec.json, "decode", recording)
    return sizes


@pytest.mark.parametrize("name", BODIES)
async def test_the_work_does_not_grow_with_the_body(name: str, decoded_sizes: list[int]) -> None:
    path, body = BODIES[name]
    async with asgi_client(ScriptedService("a", **LIMITS)) as client:
        await measure(client, path, body(0), JSON)  # imports and caches
        results = [await measure(client, path, body(size), JSON) for size in (0, 1)]
    assert [status for status, _ in results] == [200, 200]
    assert results[1][1] - results[0][1] < MAX_MORE_CALLS
    assert max(decoded_sizes) <= INLINE_BYTES


async def test_stored_responses_are_read_and_written_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite waits for the disk, and up to 10 s for a transaction of another process."""
    threads: set[int] = set()
    for name in ("__init__", "put", "finish", "get", "is_unfinished", "delete"):
        method = getattr(ResponseStore, name)

        def recording(*args: Any, method: Any = method) -> Any:
            threads.add(threading.get_ident())
            return method(*args)

        monkeypatch.setattr(ResponseStore, name, recording)
    async with asgi_client(ScriptedService("a")) as client:
        created = (await client.post("/v1/responses", json={"input": "x"})).json()
        path = f"/v1/responses/{created['id']}"
        assert (await client.post("/v1/responses", json={"input": "x", "previous_response_id": created["id"]})).status_code == 200
        assert (await client.get(path)).json() == created and (await client.delete(path)).status_code == 200
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [97] * 385}, "tokens"),
        ("/v1/completions", {"prompt": [97] * 385}, "prompt"),
        ("/v1/completions", {"prompt": [[97], [97] * 385]}, "prompt"),
    ],
)
async def test_ids_are_limited_by_the_length_of_a_sequence(path: str, body: dict[str, Any], param: str) -> None:
    async with asgi_client(ScriptedService()) as client:
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and "385" in error["message"] and "at most 384" in error["message"]


async def test_ids_of_a_prompt_that_is_truncated_are_limited_by_the_request() -> None:
    async with asgi_client(ScriptedService()) as client:
        body = {"prompt": [97] * 10_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400  # the scripted service does not truncate
        error = (await client.post("/v1/completions", json={**body, "prompt": [97] * (MAX_IDS + 1)})).json()["error"]
        assert f"{MAX_IDS + 1} token ids, and the limit of a request is {MAX_IDS}" in error["message"]
