"""Reads the block events of one replica into the index of its fleet."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from stoker.base.logging import get_logger
from stoker.router.core.fleet import Fleet
from stoker.router.core.replica import Replica
from stoker.runtime.kv.events.wire import (
    DEVICE_MEDIUM,
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventAddress,
    EventBatch,
    decode_batch,
)

log = get_logger(__name__)

REPLAY_S = 5.0  # limit for one message of a replay
MAX_RECEIVED = 100_000  # messages that wait in memory; further ones are dropped, which is noticed by their numbers


class EventSubscriber:
    """The task that applies the events of a replica, from the first one that its publisher still has.

    Batches are numbered. After a gap, the missing ones are requested again; if that is impossible, the replica is assumed to hold no
    blocks, because a removal may be among the missing events.
    """

    def __init__(self, fleet: Fleet, replica: Replica, address: EventAddress, context: zmq.asyncio.Context) -> None:
        host = urlsplit(replica.name).hostname or ""
        self.address = address
        self._fleet, self._replica = fleet, replica
        self._endpoint = reachable(address.endpoint, host)
        self._replay_endpoint = reachable(address.replay, host) if address.replay is not None else None
        self._context = context
        self._last = -1  # number of the last batch that was applied
        self._last_ts = 0.0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.set(zmq.RCVHWM, MAX_RECEIVED)
            socket.set(zmq.LINGER, 0)
            socket.subscribe(self.address.topic.encode())
            socket.connect(self._endpoint)
            self._replica.publishes_events = True
            try:
                await self._repeat_from(0)
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        await self._receive(int.from_bytes(frames[1], "big"), frames[2])
            finally:
                self._replica.publishes_events = False

    async def _receive(self, number: int, payload: bytes) -> None:
        """Apply one batch, after those that are missing before it. A malformed one counts as missing."""
        try:
            batch = decode_batch(payload)
        except ValueError as error:
            log.warning("%s: %s", self._replica.name, error)
            self._forget()
            self._last = number
            return
        if number <= self._last:
            if batch.ts <= self._last_ts:
                return  # a replay contained it
            self._forget()  # the publisher was restarted, and counts from 0 again
            self._last = -1
        if number > self._last + 1 and not await self._repeat_from(self._last + 1, number):
            self._forget()
        if number > self._last:
            self._apply(number, batch)

    async def _repeat_from(self, first: int, before: int | None = None) -> bool:
        """Request the batches from number `first` on and apply them. False if those up to `before` are not complete."""
        if self._replay_endpoint is None:
            return False
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            try:
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        frames = await socket.recv_multipart()
                    if len(frames) != 3 or frames[1] == END:
                        break
                    number, batch = int.from_bytes(frames[1], "big"), decode_batch(frames[2])
                    if number > self._last + 1 and first > 0:
                        return False
                    if number > self._last:
                        self._apply(number, batch)
            except (TimeoutError, ValueError) as error:
                log.warning("%s: the replay of block events failed: %s", self._replica.name, error or "no answer")
        return before is None or self._last >= before - 1

    def _apply(self, number: int, batch: EventBatch) -> None:
        """Apply the events of a batch to the index."""
        self._last, self._last_ts = number, batch.ts
        slot, stored = self._replica.slot, self._fleet.stored
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes, medium=medium):
                    if medium in (None, DEVICE_MEDIUM):
                        stored.store(slot, hashes)
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    if medium in (None, DEVICE_MEDIUM):
                        stored.remove(slot, hashes)
                case AllBlocksCleared():
                    stored.clear(slot)

    def _forget(self) -> None:
        """The events since an unknown one are missing: the replica is assumed to hold nothing."""
        self._fleet.stored.clear(self._replica.slot)


def reachable(endpoint: str, host: str) -> str:
    """The address of a replica's publisher for this machine: a wildcard address is replaced by the host of the replica's URL."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if endpoint.startswith(wildcard):
            return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.removeprefix(wildcard)}"
    return endpoint
