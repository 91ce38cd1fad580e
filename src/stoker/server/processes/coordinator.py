"""The coordination of several processes: the supervisor runs actions, and sends changes to the frontends over a Unix socket.

A message is a pickled tuple after its length (4 bytes, little-endian), as the tasks of child processes. Frontend → supervisor: ("call",
number, action, arguments), ("applied", number). Supervisor → frontend: ("change", number, values), ("result", number, result, error).
The socket is in the run directory, which only the user of the server can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError, UnavailableError
from stoker.base.logging import get_logger
from stoker.server.coordination import Coordination, Coordinator, Values

log = get_logger(__name__)

SOCKET = "coordination"
MAX_PATH_BYTES = 107  # of a Unix socket


class SupervisorCoordinator(Coordinator):
    """The supervisor's side. `values` are sent to each frontend that connects."""

    def __init__(self) -> None:
        super().__init__()
        self._frontends: dict[asyncio.StreamWriter, dict[int, asyncio.Event]] = {}  # each with its changes that are not applied yet
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, run_dir: Path) -> asyncio.Server:
        """Accept frontends at a Unix socket in `run_dir`, the folder of this server."""
        if len(os.fsencode(run_dir / SOCKET)) > MAX_PATH_BYTES:
            text = f"the socket path {str(run_dir / SOCKET)!r} is longer than {MAX_PATH_BYTES} bytes."
            raise ConfigError(text, cure="Set TMPDIR to a shorter folder.")
        return await asyncio.start_unix_server(self._serve, run_dir / SOCKET)

    async def close(self) -> None:
        """Close the connections to all frontends, and end running actions."""
        for task in self._tasks:
            task.cancel()
        for writer in self._frontends:
            writer.close()

    async def publish(self, changes: Values) -> None:
        """Apply changes in all frontends. Returns when each has applied them or has disconnected."""
        await self.apply(changes)
        await asyncio.gather(*(self._send(writer, changes) for writer in list(self._frontends)))

    async def _send(self, writer: asyncio.StreamWriter, changes: Values) -> None:
        """Send changed values to one frontend, and wait until it has applied them or has ended."""
        if (pending := self._frontends.get(writer)) is None:  # it has ended
            return
        number, applied = next(self._numbers), asyncio.Event()
        pending[number] = applied
        _write(writer, ("change", number, changes))
        await applied.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send all values to a frontend that has connected, then run the actions it calls until it disconnects."""
        pending = self._frontends[writer] = {}
        sending = asyncio.create_task(self._send(writer, dict(self._values)))
        try:
            while (message := await _read(reader)) is not None:
                if message[0] == "applied":
                    pending.pop(message[1]).set()
                else:
                    task = asyncio.create_task(self._run(writer, *message[1:]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            del self._frontends[writer]
            for applied in pending.values():  # a frontend that has ended applies nothing
                applied.set()
            await sending
            writer.close()

    async def _run(self, writer: asyncio.StreamWriter, number: int, action: str, arguments: tuple[Any, ...]) -> None:
        """Run an action that a frontend calls, and send it the result or the error message. `number` identifies the call."""
        try:
            result, error = await self.call(action, *arguments), None
        except Exception as failure:
            log.exception("the action %s failed", action)
            result, error = None, f"{action} failed: {failure}"
        if not writer.is_closing():
            _write(writer, ("result", number, result, error))


class FrontendCoordination(Coordination):
    """A frontend's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._connected = asyncio.Event()
        self._tasks = {asyncio.create_task(self._receive())}

    @classmethod
    async def connect(cls, run_dir: str) -> FrontendCoordination:
        """Connect to the supervisor and receive the present values. Raises UnavailableError if it has ended."""
        try:
            coordination = cls(*await asyncio.open_unix_connection(Path(run_dir) / SOCKET))
        except OSError:
            raise UnavailableError("the supervisor has ended.") from None
        await coordination._connected.wait()
        return coordination

    async def call(self, action: str, *arguments: Any) -> Any:
        """Run the action in the supervisor and return its result.

        Raises UnavailableError if it fails there, or the connection has ended.
        """
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        _write(self._writer, ("call", number, action, arguments))
        try:
            return await future
        finally:
            del self._calls[number]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _receive(self) -> None:
        """Read messages of the supervisor: changed values, and results of calls. Ends when the connection closes."""
        while (message := await _read(self._reader)) is not None:
            if message[0] == "change":
                task = asyncio.create_task(self._apply(*message[1:]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif (future := self._calls.get(message[1])) is not None and not future.done():
                if message[3] is None:
                    future.set_result(message[2])
                else:
                    future.set_exception(UnavailableError(message[3]))
        for future in self._calls.values():
            future.set_exception(UnavailableError("the server is stopping."))

    async def _apply(self, number: int, changes: Values) -> None:
        """Apply the change with this number, and confirm it to the supervisor, also if it failed."""
        try:
            await self.apply(changes)
        except Exception:
            log.exception("a change of %s failed", ", ".join(changes))
        self._connected.set()
        _write(self._writer, ("applied", number))


def _write(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    """Send a message as its pickled size in 4 bytes and its pickle."""
    data = pickle.dumps(message)
    writer.write(len(data).to_bytes(4, "little") + data)


async def _read(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """The next message; None at the end of the connection."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        message: tuple[Any, ...] = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message
