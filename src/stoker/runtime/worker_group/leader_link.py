"""A follower's connection to its leader, which is the socket on standard input.

The leader sends the task, and with it the descriptor of the plan channel. The follower sends one byte for each state that it reaches. The
end of the connection is the end of the leader, which ends the follower at any time, also before it has a task and while it imports.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future

SIZE_BYTES = 8  # of the size of a task, little-endian, which precedes it


class LeaderLink:
    """The follower's end of the connection. A thread reads it."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=0)
        self._task: Future[tuple[bytes, int]] = Future()
        threading.Thread(target=self._read, name="leader", daemon=True).start()

    def receive_task(self) -> tuple[bytes, int]:
        """Wait for the task, and return it and the descriptor of the plan channel."""
        return self._task.result()

    def report(self, state: bytes) -> None:
        """Send a state, which is one byte."""
        self._socket.sendall(state)

    def _read(self) -> None:
        """The thread: read the task, and end the process when the leader has ended."""
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, SIZE_BYTES, 1, socket.MSG_WAITALL)
            size, data = int.from_bytes(head, "little"), b""
            while len(data) < size and (chunk := self._socket.recv(size - len(data))):
                data += chunk
            if len(head) == SIZE_BYTES and len(data) == size:
                self._task.set_result((data, fds[0]))
                while self._socket.recv(4096):
                    pass
        finally:  # also if the connection was reset
            os._exit(0)


def send_task(connection: socket.socket, task: bytes, fd: int) -> None:
    """The leader's side: send a task, and the descriptor of the plan channel. Raises OSError if the follower has ended."""
    socket.send_fds(connection, [len(task).to_bytes(SIZE_BYTES, "little")], [fd])
    connection.sendall(task)
