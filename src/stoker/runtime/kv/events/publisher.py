"""Publishes block events over ZeroMQ. A thread converts and sends them; the step loop only puts a list into a queue."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence as Seq

import zmq

from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.runtime.kv.events.batches import make_batch
from stoker.runtime.kv.events.log import BlockChanges
from stoker.runtime.kv.events.wire import END, AllBlocksCleared, EventAddress, EventBatch, encode_batch

log = get_logger(__name__)

MAX_REPLAYED_BATCHES = 10_000  # batches in memory for subscribers that missed some
MAX_REPLAYED_BYTES = 64 << 20
MAX_UNSENT = 100_000  # messages for one slow subscriber; more are dropped, and it requests a replay
REPLAY_SEND_MS = 1000  # a subscriber that does not read its replay for this time gets no more of it
REPLAY_POLL_MS = 200  # interval at which the thread of replays checks whether to end
STOP_S = 5.0


class EventPublisher:
    """The PUB socket at `endpoint`, and optionally a ROUTER socket at `replay` that repeats batches. Both bind at once.

    Addresses are tcp://HOST:PORT, where HOST may be * for all interfaces and PORT may be * for any free one, or ipc://PATH. The first batch
    has the single event AllBlocksCleared, so that subscribers of an earlier executor at the same address forget its blocks. Raises
    ConfigError if an address cannot be used.
    """

    def __init__(self, endpoint: str, replay: str | None, topic: str, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._topic = topic.encode()
        self._queue: queue.SimpleQueue[Seq[BlockChanges] | None] = queue.SimpleQueue()
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._lock = threading.Lock()  # of `_sent`, which both threads use
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._pub = self._bind("kv_events", endpoint, zmq.PUB)
        self._replay = self._bind("kv_events_replay", replay, zmq.ROUTER) if replay is not None else None
        self.address = EventAddress(_endpoint(self._pub), _endpoint(self._replay) if self._replay is not None else None, topic)
        self._threads = [threading.Thread(target=self._run, name="stoker-kv-events", daemon=True)]
        if self._replay is not None:
            self._threads.append(threading.Thread(target=self._run_replay, name="stoker-kv-replay", daemon=True))
        for thread in self._threads:
            thread.start()

    def publish(self, changes: Seq[BlockChanges]) -> None:
        """Send the changes of a step. Returns at once; does nothing if there are none."""
        if changes:
            self._queue.put(changes)

    def close(self) -> None:
        """Send what is queued, and end the threads. May be called repeatedly."""
        if self._context.closed:
            return
        self._stopping.set()
        self._queue.put(None)
        for thread in self._threads:  # each closes its socket, because sockets belong to one thread
            thread.join(STOP_S)
        self._context.term()

    def _bind(self, setting: str, endpoint: str, kind: int) -> zmq.Socket[bytes]:
        """A socket bound to `endpoint`. Raises ConfigError that names the setting."""
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, MAX_UNSENT)
        socket.set(zmq.LINGER, 500)
        if kind == zmq.ROUTER:
            socket.set(zmq.SNDTIMEO, REPLAY_SEND_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{setting}={endpoint!r} cannot be used: {error}.", cure="Use a free port, or an address of this machine."
            ) from None
        return socket

    def _run(self) -> None:
        """The thread that sends. It ends with the None that `close` puts into the queue."""
        self._send(EventBatch(time.time(), [AllBlocksCleared()], 0))
        while (changes := self._queue.get()) is not None:
            try:
                self._send(make_batch(changes, self._tokens_per_block, time.time()))
            except zmq.ZMQError as error:
                log.error("a batch of block events could not be sent: %s", error)
        self._pub.close()

    def _send(self, batch: EventBatch) -> None:
        """Send one batch with the next number, and keep it for replays."""
        payload = encode_batch(batch)
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._sent.append((number, payload))
            self._sent_bytes += len(payload)
            while len(self._sent) > MAX_REPLAYED_BATCHES or self._sent_bytes > MAX_REPLAYED_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _run_replay(self) -> None:
        """The thread that answers replays. It ends when `close` sets `_stopping`."""
        assert self._replay is not None
        while not self._stopping.is_set():
            try:
                if self._replay.poll(REPLAY_POLL_MS):
                    self._repeat(self._replay, self._replay.recv_multipart())
            except zmq.ZMQError as error:
                log.warning("a replay of block events ended early: %s", error)
        self._replay.close()

    def _repeat(self, replay: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Answer one request: (subscriber, empty frame, first number). Others are logged and ignored."""
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("ignored a request for a replay with %d frames", len(frames))
            return
        first = int.from_bytes(frames[2], "big")
        with self._lock:
            batches = [(number, payload) for number, payload in self._sent if number >= first]
        for number, payload in batches:
            replay.send_multipart((frames[0], b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((frames[0], b"", END, b""))


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    """The address to which a socket is bound, with the actual port."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
