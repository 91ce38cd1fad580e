"""An authenticated connection between two nodes, which carries frames in both directions.

Both ends prove that they have the shared secret, and every frame has a message authentication code. Someone without the secret can
therefore neither join nor inject, change, repeat or reorder frames; the content is not encrypted.

    handshake   client: MAGIC, nonce 32      server: MAGIC, nonce 32      client: proof 32      server: proof 32
    frame       length 4 (little-endian, of the payload), authentication code 16, payload: kind 1, body

A proof is the HMAC-SHA256 of a direction and both nonces. The code is keyed BLAKE2b of the number of the frame and the payload, with a key
for each direction of each connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"stoker-node-1\n"
MAC_SIZE = 16
MAX_CONTROL_BYTES = 1 << 20  # of a frame that is no step
HANDSHAKE_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 0.2  # between calls of `check` while a send waits

Buffer = bytes | bytearray | memoryview


class LinkError(Exception):
    """The connection is closed or silent, or the other end violates the protocol. The message is the end of a sentence about it."""


class SecretError(LinkError):
    """The other end does not have the same shared secret."""


class Link:
    """One end of a connection whose handshake is complete. One thread receives; any thread may send."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self.max_bytes = MAX_CONTROL_BYTES  # of a received payload; raised for steps
        self.last_received = time.monotonic()
        self._socket, self._send_key, self._receive_key = connection, send_key, receive_key
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        connection.setblocking(False)

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        """The address of the other end when the connection was opened."""
        return str(self._socket.getpeername()[0])

    def send(self, kind: int, *parts: Buffer, check: Callable[[], None] = lambda: None) -> None:
        """Send a frame. While the other end does not read, `check` is called every CHECK_INTERVAL_S, and raises to end the wait."""
        while not self._sending.acquire(timeout=CHECK_INTERVAL_S):
            check()
        try:
            self._send(kind, parts, check)
        finally:
            self._sending.release()

    def send_if_idle(self, kind: int) -> None:
        """Send an empty frame, unless another thread is sending or the send buffer is full, which both show that data is on its way."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if self._is_ready(select.POLLOUT, 0.0):
                self._send(kind, (), lambda: None)
        finally:
            self._sending.release()

    def receive(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> tuple[int, bytearray]:
        """The kind and body of the next frame. Raises LinkError if nothing arrives for `timeout_s`; `check` is called while it waits."""
        head = self._receive(4 + MAC_SIZE, timeout_s, check)
        size = int.from_bytes(head[:4], "little")
        if not 1 <= size <= self.max_bytes:
            raise LinkError(f"sent a frame of {size} bytes, and at most {self.max_bytes} are allowed")
        payload = self._receive(size, timeout_s, check)
        code = _code(self._receive_key, self._num_received, payload)
        if not hmac.compare_digest(code, bytes(head[4:])):
            raise LinkError("sent a frame with a wrong authentication code")
        self._num_received += 1
        return payload[0], payload[1:]

    def close(self) -> None:
        """Close the connection. A thread that receives gets LinkError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _is_ready(self, event: int, timeout_s: float = CHECK_INTERVAL_S) -> bool:
        """Wait until the socket can be read or written without blocking. False after `timeout_s`. Raises ValueError if it was closed."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(timeout_s * 1000))

    def _send(self, kind: int, parts: tuple[Buffer, ...], check: Callable[[], None]) -> None:
        """Send a frame; the lock is held."""
        pieces: list[Buffer] = [bytes([kind]), *(memoryview(part).cast("B") for part in parts)]
        size = sum(len(piece) for piece in pieces)
        code = _code(self._send_key, self._num_sent, *pieces)
        self._num_sent += 1
        data = memoryview(b"".join([size.to_bytes(4, "little"), code, *pieces]))
        try:
            while data:
                if self._is_ready(select.POLLOUT):
                    with contextlib.suppress(BlockingIOError):
                        data = data[self._socket.send(data) :]
                else:
                    check()
        except (OSError, ValueError) as error:  # ValueError: the socket was closed by another thread
            raise LinkError(f"closed the connection ({_reason(error)})") from None

    def _receive(self, size: int, timeout_s: float, check: Callable[[], None]) -> bytearray:
        """Exactly `size` bytes."""
        data = bytearray(size)
        view, deadline = memoryview(data), time.monotonic() + timeout_s
        try:
            while view:
                if self._is_ready(select.POLLIN):
                    count = self._socket.recv_into(view)
                    if not count:
                        raise LinkError("closed the connection")
                    view, self.last_received = view[count:], time.monotonic()
                    deadline = self.last_received + timeout_s
                    continue
                check()
                if time.monotonic() > deadline:
                    raise LinkError(f"has sent nothing for {timeout_s:g} s")
        except (OSError, ValueError) as error:
            raise LinkError(f"closed the connection ({_reason(error)})") from None
        return data


def accept_link(connection: socket.socket, secret: bytes) -> Link:
    """The server's side of a handshake. Raises LinkError if the client does not prove the secret within HANDSHAKE_TIMEOUT_S."""
    ours, theirs = _send_nonces(connection)
    if not hmac.compare_digest(_read(connection, 32), _proof(secret, b"client", theirs, ours)):
        raise SecretError("has another shared secret (STOKER_CLUSTER_TOKEN)")
    _write(connection, _proof(secret, b"server", theirs, ours))
    return Link(connection, _proof(secret, b"to client", theirs, ours), _proof(secret, b"to server", theirs, ours))


def open_link(connection: socket.socket, secret: bytes) -> Link:
    """The client's side of a handshake. Raises LinkError."""
    ours, theirs = _send_nonces(connection)
    _write(connection, _proof(secret, b"client", ours, theirs))
    try:
        proof = _read(connection, 32)
    except LinkError:  # a server closes the connection after a wrong proof
        raise SecretError("closed the connection; its shared secret (STOKER_CLUSTER_TOKEN) may be another one") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", ours, theirs)):
        raise SecretError("has another shared secret (STOKER_CLUSTER_TOKEN)")
    return Link(connection, _proof(secret, b"to server", ours, theirs), _proof(secret, b"to client", ours, theirs))


def _send_nonces(connection: socket.socket) -> tuple[bytes, bytes]:
    """Send and receive the greeting. Returns (own nonce, nonce of the other end)."""
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = secrets.token_bytes(32)
    _write(connection, MAGIC + nonce)
    greeting = _read(connection, len(MAGIC) + 32)
    if greeting[: len(MAGIC)] != MAGIC:
        raise LinkError("is not a node of this version of Stoker")
    return nonce, greeting[len(MAGIC) :]


def _write(connection: socket.socket, data: bytes) -> None:
    """Send bytes of the handshake."""
    try:
        connection.sendall(data)
    except OSError as error:
        raise LinkError(f"closed the connection ({_reason(error)})") from None


def _read(connection: socket.socket, size: int) -> bytes:
    """Receive bytes of the handshake. All of them must arrive within HANDSHAKE_TIMEOUT_S."""
    deadline, data = time.monotonic() + HANDSHAKE_TIMEOUT_S, b""
    while len(data) < size:
        try:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = connection.recv(size - len(data))
        except OSError as error:
            raise LinkError(f"does not answer ({_reason(error)})") from None
        if not part:
            raise LinkError("closed the connection")
        data += part
    return data


def _proof(secret: bytes, purpose: bytes, client: bytes, server: bytes) -> bytes:
    """A 32-byte value that only the two ends of this connection can compute, for one purpose."""
    return hmac.digest(secret, purpose + b"\0" + client + server, "sha256")


def _code(key: bytes, number: int, *pieces: Any) -> bytes:
    """The authentication code of the frame with this number."""
    code = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=MAC_SIZE)
    for piece in pieces:
        code.update(piece)
    return code.digest()


def _reason(error: Exception) -> str:
    """The reason of a failed system call, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
