"""The ZeroMQ transport, executor side: several frontend processes are connected to one executor; messages are msgpack.

The executor binds a ROUTER socket. Each frontend connects a DEALER socket, whose routing id is the name of the client. A process that ends
is detected by its closed connection, a stopped process by ZeroMQ's heartbeats, and a hung loop by unanswered pings.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time

import msgspec
import zmq

from stoker.base.errors import ConfigError, StokerError
from stoker.base.logging import get_logger
from stoker.base.profile_query import ProfileQuery, ProfileResult
from stoker.runtime.client import Cancel, ExecutorInfo, Mailbox, Message, Pause, Shutdown, StatsQuery, Submit
from stoker.runtime.live_state import LiveQuery, LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput
from stoker.runtime.transport.in_process import split_by_client
from stoker.runtime.transport.streams import NAME_CHARS

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 1 << 28
MAX_MESSAGES_PER_POLL = 256  # limits the delay of the next step when many requests arrive
MAX_QUEUED_STEPS = 10_000  # messages for a frontend that does not read; with more, its requests are cancelled
MAX_WAKEUPS = 4096  # that end one wait together
HEARTBEAT_S = 1.0
CLIENT_TIMEOUT_S = 15.0  # requests of a frontend that sends nothing for this time are cancelled
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # members of enumerations would be converted at each call


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of a client, which is answered with Welcome."""


class Ping(msgspec.Struct, tag=True, array_like=True):
    """A heartbeat of a client, which the step loop answers with Pong."""


class Bye(msgspec.Struct, tag=True, array_like=True):
    """The client disconnects."""


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The answer to Hello."""

    info: ExecutorInfo


class Pong(msgspec.Struct, tag=True, array_like=True):
    """The answer to Ping."""


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """Outputs of one step for one client."""

    outputs: list[SequenceOutput]


class StatsReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to StatsQuery."""

    number: int
    stats: ExecutorStats


class LiveReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to LiveQuery."""

    number: int
    state: LiveState


class ProfileReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to ProfileQuery."""

    number: int
    result: ProfileResult


class Closed(msgspec.Struct, tag=True, array_like=True):
    """The executor has closed the connection."""

    reason: str


ToExecutor = Submit | Cancel | Pause | StatsQuery | LiveQuery | ProfileQuery | Shutdown | Hello | Ping | Bye
ToClient = Outputs | Pong | StatsReply | LiveReply | ProfileReply | Welcome | Closed


class _Peer:
    """A connected frontend."""

    __slots__ = ("last_receive_s", "open")

    def __init__(self, last_receive_s: float) -> None:
        self.last_receive_s = last_receive_s
        self.open: dict[str, int] = {}  # request id → number of sequences that have not ended


class ZmqMailbox(Mailbox):
    """The executor's end. It binds to `address`: ipc://PATH, or tcp://127.0.0.1:PORT, where PORT may be * for any free port.

    The attribute `address` has the actual port.
    """

    def __init__(self, address: str, info: ExecutorInfo, *, client_timeout_s: float = CLIENT_TIMEOUT_S) -> None:
        check_address(address)
        self.info = info
        self._client_timeout_s = client_timeout_s
        self._peers: dict[str, _Peer] = {}
        self._messages: list[Message] = []
        self._next_check_s = 0.0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[ToExecutor]).decode
        self._waker, self._wakeups = socket.socketpair()  # a socket of ZeroMQ may be used by one thread only
        self._waker.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # raise if the frontend of a message is not connected
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a frontend that connects again replaces its former connection
        configure(self._socket, client_timeout_s)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeups, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[Message]:
        # This takes a third of the time of a zmq.Poller, and a busy loop does it once per step.
        if has_message(self._socket) or (timeout_s > 0 and not self._messages and self._wait(timeout_s)):
            self._receive()
        self._check_clients()
        messages, self._messages = self._messages, []
        return messages

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # if the mailbox is closed, or as many wake-ups are pending as fit
            self._waker.send(b"\0")

    def send(self, outputs: list[SequenceOutput]) -> None:
        """Send the outputs to their clients. Those of unknown clients are dropped."""
        for name, batch in split_by_client(outputs).items():
            if (peer := self._peers.get(name)) is None:
                continue
            for output in batch:
                if output.finish_reason is not None:
                    _count_down(peer.open, output.request_id)
            self._send(name, Outputs(batch))

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        self._send(query.client, StatsReply(query.number, stats))

    def reply_live(self, query: LiveQuery, state: LiveState) -> None:
        self._send(query.client, LiveReply(query.number, state))

    def reply_profile(self, query: ProfileQuery, result: ProfileResult) -> None:
        self._send(query.client, ProfileReply(query.number, result))

    def close(self, reason: str = "the executor stopped") -> None:
        if self._socket.closed:
            return
        for name in list(self._peers):
            self._send(name, Closed(reason))
        self._context.destroy(linger=500)
        self._waker.close()
        self._wakeups.close()

    def _wait(self, timeout_s: float) -> bool:
        """Wait for a message, for `wake`, or `timeout_s` seconds, and check for clients that are gone. True if a message has arrived."""
        # In intervals, so that an idle loop also detects frontends that do not answer.
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not self._messages:
            if ready := dict(self._poller.poll(math.ceil(min(left, HEARTBEAT_S) * 1000))):
                if self._wakeups.fileno() in ready:
                    self._wakeups.recv(MAX_WAKEUPS)
                return self._socket in ready
            self._check_clients()
        return False

    def _receive(self) -> None:
        """Read the message that has arrived and those after it, up to MAX_MESSAGES_PER_POLL."""
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:  # the connection was closed since `has_message`, and its messages were dropped
                return
            self._process(frames, now)
            if not has_message(self._socket):
                return

    def _process(self, frames: list[bytes], now: float) -> None:
        """Process the messages that a client sent together. Invalid ones are logged and ignored."""
        name = frames[0].decode("ascii", "replace")
        if len(name) != NAME_CHARS or len(frames) != 2:
            log.warning("ignored a message with %d frames from %r", len(frames), name)
            return
        if (peer := self._peers.get(name)) is None:
            peer = self._peers[name] = _Peer(now)
        peer.last_receive_s = now
        try:
            for message in self._decode(frames[1]):
                self._accept(name, peer, message)
        except (msgspec.MsgspecError, StokerError, ValueError) as error:
            log.warning("client %s sent an invalid message: %s", name, error)
            self._send(name, Closed(f"it refused a message: {error}"))
            self._drop_client(name)

    def _accept(self, name: str, peer: _Peer, message: ToExecutor) -> None:
        """Process one message of the client `name`."""
        match message:
            case Ping():
                self._send(name, Pong())
            case Hello():
                self._send(name, Welcome(self.info))
            case Bye():
                self._drop_client(name)
            case Submit(request):
                _check_owner(name, request.request_id)
                peer.open[request.request_id] = request.params.n
                self._messages.append(message)
            case Cancel(request_id):
                _check_owner(name, request_id)
                self._messages.append(message)
            case StatsQuery(_, number):
                self._messages.append(StatsQuery(name, number))
            case LiveQuery() | ProfileQuery():
                self._messages.append(msgspec.structs.replace(message, client=name))
            case Pause() | Shutdown():
                self._messages.append(message)

    def _send(self, name: str, message: ToClient) -> None:
        """Send a message to the client `name`, which is dropped if it is gone or does not read."""
        try:
            self._socket.send_multipart((name.encode(), self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._drop_client(name)

    def _drop_client(self, name: str) -> None:
        """Forget a client and cancel all of its requests."""
        if (peer := self._peers.pop(name, None)) is not None:
            self._messages.extend(Cancel(request_id) for request_id in peer.open)

    def _check_clients(self) -> None:
        """Cancel the requests of clients that have sent nothing for the time-out."""
        now = time.monotonic()
        if now < self._next_check_s:
            return
        self._next_check_s = now + min(HEARTBEAT_S, self._client_timeout_s / 4)
        for name, peer in [entry for entry in self._peers.items() if now - entry[1].last_receive_s > self._client_timeout_s]:
            log.warning("frontend %s sent nothing for %.1f s; its requests are cancelled", name, self._client_timeout_s)
            peer.last_receive_s = now
            self._messages.extend(Cancel(request_id) for request_id in peer.open)
            # A frontend that was only blocked remains connected and receives the last outputs. If the connection is closed, this drops it.
            self._send(name, Pong())


def configure(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    """Set the limits and heartbeats of a socket that are the same for both ends. `timeout_s` is the heartbeat time-out in seconds."""
    socket.set(zmq.LINGER, 500)
    socket.set(zmq.SNDHWM, MAX_QUEUED_STEPS)
    socket.set(zmq.RCVHWM, MAX_QUEUED_STEPS)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(timeout_s * 1000))


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received without waiting. It takes a quarter of the time of a receive that raises zmq.Again."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def check_address(address: str) -> None:
    """Raise ConfigError unless `address` is valid and reachable only from this machine."""
    if not address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")):
        raise ConfigError(f"the executor address {address!r} is refused.", cure="Use ipc://PATH or tcp://127.0.0.1:PORT.")
    if address.startswith("ipc://") and len(address.encode()) - len("ipc://") > 107:
        raise ConfigError(f"the socket path {address!r} is longer than 107 bytes.", cure="Use a shorter directory.")


def _check_owner(name: str, request_id: str) -> None:
    """Raise ValueError unless the request id belongs to the client `name`, with which the ids of its requests begin."""
    if not request_id.startswith(f"{name}:"):
        raise ValueError(f"request id {request_id!r} does not begin with the name of its client")


def _count_down(open_requests: dict[str, int], request_id: str) -> None:
    """Record that one more sequence of a request has ended."""
    if open_requests.get(request_id, 0) <= 1:
        open_requests.pop(request_id, None)
    else:
        open_requests[request_id] -= 1
