"""`stoker route` over gRPC, with the client of tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from live_http import until
from routed import StubReplica, replicas, routed
from scripted_service import ScriptedService
from tritonclient.utils import InferenceServerException

from stoker.base.types import Delta, GenerationRequest
from stoker.router.core.settings import RoutingSettings
from stoker.router.proxy.grpc import make_grpc_server


class HeldService(ScriptedService):
    """Each request generates `num_before` tokens at once, and the others after `gate` is set."""

    num_before = 0

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.gate = asyncio.Event()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        count = 0
        async with aclosing(super().stream(request)) as batches:
            async for batch in batches:
                if count == self.num_before:
                    await self.gate.wait()
                count += 1
                yield batch


@contextlib.asynccontextmanager
async def grpc_router(stubs: list[StubReplica], **settings: Any) -> AsyncIterator[tuple[Any, triton.InferenceServerClient]]:
    async with routed(stubs, **settings) as (application, _):
        server, proxy = make_grpc_server(application, "127.0.0.1:0")
        await server.start()
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
        try:
            yield application, client
        finally:
            await client.close()
            await server.stop(0)
            await proxy.close()


def tensors(text: str = "hi", **values: Any) -> list[Any]:
    given = {"text_input": np.array([[text.encode()]], dtype=object), "max_tokens": np.array([[8]], dtype=np.int32), **values}
    made = []
    for name, value in given.items():
        dtype = {"object": "BYTES", "int32": "INT32", "bool": "BOOL"}[value.dtype.name]
        made.append(triton.InferInput(name, list(value.shape), dtype))
        made[-1].set_data_from_numpy(value)
    return made


async def text_of(client: triton.InferenceServerClient, **values: Any) -> str:
    result = await client.infer("ensemble", tensors(**values))
    return result.as_numpy("text_output").reshape(-1)[0].decode()


async def streamed(client: triton.InferenceServerClient) -> AsyncIterator[str]:
    """The texts of a streamed request. Raises the error of the stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "ensemble", "inputs": tensors(stream=np.array([[True]]))}

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        yield result.as_numpy("text_output").reshape(-1)[0].decode()


async def test_calls_are_forwarded_and_repeated() -> None:
    services = [HeldService("Hello"), HeldService("Hello")]
    async with replicas(*services) as stubs, grpc_router(stubs) as (_, client):
        assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("ensemble")
        assert (await client.get_model_metadata("ensemble")).name == "ensemble"
        with pytest.raises(InferenceServerException, match="unknown model: 'nope'"):
            await client.infer("nope", tensors())
        calls = [asyncio.create_task(text_of(client)) for _ in range(6)]
        streams = [asyncio.create_task(_joined(client)) for _ in range(2)]
        await until(lambda: sum(len(service.requests) for service in services) == 8)
        assert all(service.requests for service in services)
        await stubs[0].kill()
        for service in services:
            service.gate.set()
        assert [text.endswith("Hello") for text in await asyncio.gather(*calls)] == [True] * 6
        assert await asyncio.gather(*streams) == ["Hello", "Hello"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_replicas_without_grpc_are_no_attempts(is_stream: bool) -> None:
    """Of three replicas, one has no gRPC port and one has ended. The only repetition is left for the third one."""
    services, routing = [ScriptedService("Hello") for _ in range(3)], RoutingSettings(policy="round_robin", max_retries=1)
    async with (
        replicas(services[0], grpc_port=None) as without,
        replicas(*services[1:]) as others,
        grpc_router(without + others, routing=routing, health_interval_s=60.0) as (_, client),
    ):
        await others[0].kill()
        assert (await (_joined(client) if is_stream else text_of(client))).endswith("Hello")
        assert [len(service.requests) for service in services] == [0, 0, 1]


async def _joined(client: triton.InferenceServerClient) -> str:
    return "".join([text async for text in streamed(client)])


async def test_a_stream_ends_with_an_error_when_its_replica_ends() -> None:
    service = HeldService("Hello")
    service.num_before = 3  # the last of them waits in the replica for what follows
    async with replicas(service) as stubs, grpc_router(stubs) as (_, client):
        texts = streamed(client)
        assert await anext(texts) == "H"
        await anext(texts)
        await stubs[0].kill()
        with pytest.raises(grpc.aio.AioRpcError, match="the replica failed in the middle of its responses"):
            while True:
                await anext(texts)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            await text_of(client)


async def test_keys_are_checked() -> None:
    keys = {"api_keys": ("client-key-1",), "replica_api_key": "replica-key"}
    async with replicas(ScriptedService("a"), api_keys=("replica-key",)) as stubs, grpc_router(stubs, **keys) as (_, client):
        with pytest.raises(InferenceServerException, match="requires an API key"):
            await text_of(client)
        result = await client.infer("ensemble", tensors(), headers={"authorization": "Bearer client-key-1"})
        assert result.as_numpy("text_output").reshape(-1)[0].decode().endswith("a")


async def test_prompts_follow_their_prefix() -> None:
    services = [ScriptedService("a", max_input_len=4096) for _ in range(3)]
    async with replicas(*services) as stubs, grpc_router(stubs) as (_, client):
        for _ in range(3):
            for number in range(3):
                await text_of(client, text=f"{number} " * 600)
        counts = sorted(len({request.prompt[:2] for request in service.requests}) for service in services)
        assert sum(counts) == 3, "each prompt stays on one replica"
