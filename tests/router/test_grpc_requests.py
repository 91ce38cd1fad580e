"""The requests of a gRPC stream at the router: they are read no faster than they are sent, and may be sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from stoker.router.proxy.grpc_requests import RepeatableRequests

SIZE = 4


def request(number: int) -> bytes:
    return number.to_bytes(SIZE, "little")


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(50):
        await asyncio.sleep(0)


class Client:
    """Sends numbered requests, and counts those that were read."""

    def __init__(self, count: int) -> None:
        self.count, self.num_read = count, 0

    async def requests(self) -> AsyncIterator[bytes]:
        for number in range(self.count):
            self.num_read += 1
            yield request(number)


async def test_no_more_is_read_than_fits_while_nothing_is_sent() -> None:
    client = Client(1000)
    sent = RepeatableRequests(client.requests(), max_bytes=10 * SIZE)
    assert await sent.first() == request(0)
    await settle()
    assert client.num_read <= 12
    assert [data async for data in sent.again()] == [request(number) for number in range(1000)]
    assert not sent.is_complete
    sent.close()


async def test_a_request_that_is_larger_than_the_limit_is_sent() -> None:
    client = Client(3)
    sent = RepeatableRequests(client.requests(), max_bytes=SIZE // 2)
    assert await sent.first() == request(0)
    assert [data async for data in sent.again()] == [request(number) for number in range(3)]
    sent.close()


async def test_a_failed_call_takes_no_requests_from_its_successor() -> None:
    """A call that has failed still waits for requests. It must not drop those that the next call has not sent."""
    client, more = Client(4), asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        async for data in client.requests():
            yield data
        await more.wait()
        for number in range(4, 40):
            yield request(number)

    sent = RepeatableRequests(requests(), max_bytes=10 * SIZE)
    failed = sent.again()
    assert [await anext(failed) for _ in range(4)] == [request(number) for number in range(4)]
    waiting = asyncio.ensure_future(anext(failed, None))
    await settle()
    assert sent.is_complete
    second = sent.again()
    found = [await anext(second)]
    more.set()
    await settle()
    assert waiting.done() and waiting.result() is None
    found += [data async for data in second]
    assert found == [request(number) for number in range(40)]
    sent.close()
