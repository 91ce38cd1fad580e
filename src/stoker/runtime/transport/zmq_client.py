"""The ZeroMQ transport, client side: the connection of a frontend to an executor in another process."""

from __future__ import annotations

import asyncio
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger
from stoker.runtime.client import ExecutorInfo, Message
from stoker.runtime.transport.streams import StreamingClient, new_name
from stoker.runtime.transport.zmq_mailbox import (
    HEARTBEAT_S,
    Bye,
    Closed,
    Hello,
    LiveReply,
    Outputs,
    Ping,
    Pong,
    ProfileReply,
    StatsReply,
    ToClient,
    ToExecutor,
    Welcome,
    check_address,
    configure,
    has_message,
)

log = get_logger(__name__)

RECONNECT_MS = 20  # between attempts while the executor loads. The default of ZeroMQ is 100 to 200 ms, after which a server would be ready
CONNECT_TIMEOUT_S = 120.0  # timeout of the executor until its step_timeout_s is known


class ZmqExecutorClient(StreamingClient):
    """A client of an executor in another process. It is created by `connect`, in the event loop that uses it.

    Messages of one iteration of the loop are sent together.
    """

    def __init__(self, address: str, *, timeout_s: float | None = None, heartbeat_s: float = HEARTBEAT_S) -> None:
        check_address(address)
        name = new_name()
        self._loop = asyncio.get_running_loop()
        self._has_explicit_timeout = timeout_s is not None
        self._timeout_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
        self._heartbeat_s = heartbeat_s
        self._last_receive_s = self._last_beat_s = time.monotonic()
        self._outbox: list[ToExecutor] = []
        self._welcome: asyncio.Future[ExecutorInfo] = self._loop.create_future()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToClient).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, name.encode())
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        configure(self._socket, self._timeout_s)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.add_reader(self._monitor.FD, self._watch)
        self._timer = self._loop.call_later(heartbeat_s, self._beat)
        super().__init__(None, name)  # type: ignore[arg-type]  # set in connect(), before it returns the client
        self._watch()  # an inproc socket signals its first event only after it was found empty once

    @classmethod
    async def connect(
        cls, address: str, *, connect_timeout_s: float = 30.0, timeout_s: float | None = None, heartbeat_s: float = HEARTBEAT_S
    ) -> ZmqExecutorClient:
        """Connect to the executor at `address`. Raises UnavailableError if it does not answer within `connect_timeout_s` seconds.

        An executor that does not answer for `timeout_s` seconds (None: its step_timeout_s) counts as unavailable.
        """
        client = cls(address, timeout_s=timeout_s, heartbeat_s=heartbeat_s)
        client._post(Hello())
        try:
            client.info = await asyncio.wait_for(client._welcome, connect_timeout_s)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"No executor answers at {address} after {connect_timeout_s:g} s.", cure="Start it first.") from None
            raise
        return client

    @property
    def alive(self) -> bool:
        """Whether a message of the executor has arrived within the timeout, and the connection has not failed."""
        return self._failure is None and time.monotonic() - self._last_receive_s < self._timeout_s

    async def close(self) -> None:
        if self._socket.closed:
            return
        self._timer.cancel()
        linger = 500 if self._failure is None or self._ended else 0
        self._fail("this client was closed")
        self._ended = True
        self._changed.set()
        if linger:
            self._outbox.append(Bye())
            self._flush()
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        await self._loop.run_in_executor(None, self._context.destroy, linger)

    def _transmit(self, message: Message) -> None:
        self._post(message)

    def _post(self, message: ToExecutor) -> None:
        """Queue a message, which is sent at the end of this iteration of the event loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        """Send all queued messages as one. The executor counts as gone if it does not read them."""
        if not self._outbox or self._socket.closed:
            return
        outbox, self._outbox = self._outbox, []
        try:
            self._socket.send(self._encode(outbox), zmq.NOBLOCK)
        except zmq.Again:
            self._fail("it stopped reading")
        self._receive()  # the descriptor of a ZeroMQ socket is edge-triggered, and a send may have consumed an event

    def _receive(self) -> None:
        """Process all messages that have arrived."""
        try:
            while not self._socket.closed and has_message(self._socket):
                self._accept(self._decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:  # the connection was closed since `has_message`, and its messages were dropped
            return
        except msgspec.MsgspecError as error:
            self._fail(f"it sent an invalid message: {error}")

    def _accept(self, message: ToClient) -> None:
        """Process one message of the executor."""
        self._last_receive_s = time.monotonic()
        match message:
            case Outputs(outputs):
                self._deliver(outputs)
            case StatsReply(number, stats):
                self._answer(number, stats)
            case LiveReply(number, state):
                self._answer(number, state)
            case ProfileReply(number, result):
                self._answer(number, result)
            case Welcome(info):
                self.info = info
                if not self._has_explicit_timeout:
                    self._timeout_s = max(info.step_timeout_s, 3 * self._heartbeat_s)
                if not self._welcome.done():
                    self._welcome.set_result(info)
                self._restore()
            case Closed(reason):
                self._fail(reason)
            case Pong():
                pass

    def _restore(self) -> None:
        """The executor has answered Hello, so it accepts requests, also if contact with it was lost before."""
        if self._failure is not None and not self._ended:
            self._failure = None
            self._changed.set()
            log.info("the executor answers again; requests are accepted.")

    def _watch(self) -> None:
        """Called when the peer disconnected: its process ended, or one of both did not answer ZeroMQ's heartbeats. Ends all requests.

        ZeroMQ connects again by itself, and `_beat` sends Hello until the executor answers.
        """
        while int(self._monitor.EVENTS) & zmq.POLLIN:
            recv_monitor_message(self._monitor)
            self._receive()  # messages that it sent before
            self._fail("the connection was closed, because its process ended, or because this process was suspended")

    def _beat(self) -> None:
        """Send a ping regularly, and end all requests if the executor has not answered for `timeout_s` seconds.

        After that, send Hello regularly, which an executor that continues answers with Welcome.
        """
        self._receive()  # messages that arrived while this process was suspended
        now = time.monotonic()
        if now - self._last_beat_s > self._timeout_s + self._heartbeat_s:  # suspended: the executor was sent nothing that it could answer
            self._last_receive_s = now
        self._last_beat_s = now
        if self._failure is None and now - self._last_receive_s > self._timeout_s:
            self._fail(f"it did not answer for {self._timeout_s:g} s")
        self._post(Ping() if self._failure is None or self._ended else Hello())
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)
