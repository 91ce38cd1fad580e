"""What a client and the executor hold after many cancelled requests, and the executor after many frontends that were killed: nothing."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
from fake_executor import info
from test_executor_transport import both, connect, make_request, running, until

from stoker.runtime.client import Cancel, Submit
from stoker.runtime.transport.streams import NAME_CHARS, StreamingClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox

NUM_REQUESTS, AT_ONCE, NUM_FRONTENDS = 1000, 50, 30


@both
async def test_cancelled_requests(kind: str) -> None:
    async with running(kind) as (executor, mailbox):
        client = await connect(mailbox)
        assert isinstance(client, StreamingClient)

        async def cancel(first: int) -> None:
            """Cancel requests before and after their first output."""
            for number in range(first, NUM_REQUESTS, AT_ONCE):
                stream = client.generate(make_request(f"r{number}", max_tokens=1000))
                if number % 4 == 0:
                    waiting = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    await asyncio.wait({waiting})
                else:
                    await anext(stream)
                await stream.aclose()

        async with asyncio.timeout(30):
            await asyncio.gather(*(cancel(first) for first in range(AT_ONCE)))
        assert client._streams == {} and client._wire_ids == {} and client._queries == {}
        await until(lambda: len(executor.requests) == NUM_REQUESTS and not executor.running)
        if isinstance(mailbox, ZmqMailbox):
            await until(lambda: [peer.open for peer in mailbox._peers.values()] == [{}])
        await client.close()


def test_frontends_that_were_killed() -> None:
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info(), client_timeout_s=0.2)
    context = zmq.Context()
    for number in range(NUM_FRONTENDS):
        name = f"{number:0{NAME_CHARS}}"
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, name.encode())
        socket.connect(mailbox.address)
        socket.send(msgspec.msgpack.encode([["Submit", msgspec.structs.replace(make_request(), request_id=f"{name}:r")]]))
    received: list[object] = []
    while sum(isinstance(message, Submit) for message in received) < NUM_FRONTENDS:
        received += mailbox.poll(5.0)
    assert len(mailbox._peers) == NUM_FRONTENDS
    context.destroy(linger=0)
    while mailbox._peers:
        received += mailbox.poll(0.05)
    received += mailbox.poll(0.0)
    assert len({message.request_id for message in received if isinstance(message, Cancel)}) == NUM_FRONTENDS
    mailbox.close()
