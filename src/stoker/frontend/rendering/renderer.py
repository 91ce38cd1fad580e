"""Renders chat templates outside the event loop: the frontend's side of the process that `worker.py` runs.

The process starts with the first chat request, and renders one request after the other. A rendering that exceeds its limits ends the
process; that request fails, and the others continue in a new process.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from stoker.base import env
from stoker.base.errors import RequestError, StokerError, UnavailableError
from stoker.frontend.chat_template import ChatTemplate, cut_at_mark
from stoker.frontend.rendering.messages import FAILED, LENGTH_BYTES, MAX_REASON_CHARS, TOO_LONG, UTF8_ERRORS, pack_object
from stoker.frontend.rendering.worker import RENDER_CPU_S

MAX_ATTEMPTS = 2  # of a rendering whose process was ended by something else than the limit of processor time
MAX_BYTES_PER_CHAR = 4  # of UTF-8


class Rendering:
    """A rendering that was requested. `answer` is the frame of the process, without its length, or the reason for a failure."""

    def __init__(self, frame: bytes, max_chars: int) -> None:
        self.frame = frame
        self.max_bytes = 1 + MAX_BYTES_PER_CHAR * max(max_chars, MAX_REASON_CHARS)
        self.attempts = 0
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def finish(self, answer: bytes) -> None:
        """Set the answer, unless its request was cancelled."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: StokerError) -> None:
        """Raise `error` in the request, unless it was cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)


class ChatRenderer:
    """A chat template and the process that renders it. Raises EngineError for a template that cannot be parsed.

    Use it from one event loop only.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, cpu_s: float = RENDER_CPU_S) -> None:
        self._template = ChatTemplate(source, special_tokens)
        self._cpu_s = cpu_s  # limit for the processor time of one rendering
        self._first_frame = pack_object((source, dict(special_tokens), cpu_s))
        self._waiting: deque[Rendering] = deque()  # the process works on the first one
        self._process: RenderingProcess | None = None

    async def render(
        self, messages: list[dict[str, Any]], /, *, max_chars: int, continue_final_message: bool = False, **values: Any
    ) -> str:
        """The prompt for these messages; `values` are those of `ChatTemplate.variables`.

        Raises RequestError for invalid messages, for more than `max_chars` characters, and for a template that fails or that exceeds its
        limits of time and memory.
        """
        variables = self._template.variables(messages, max_chars=max_chars, continue_final_message=continue_final_message, **values)
        try:
            frame = pack_object((variables, max_chars))
        except Exception as error:  # pickle raises several types
            limit = f"the messages and values for the chat template must be plain data: {error}"
            raise RequestError("messages", messages, limit) from None
        answer = await self._answer(Rendering(frame, max_chars))
        status, text = answer[0], answer[1:].decode("utf-8", UTF8_ERRORS)
        if status == TOO_LONG:
            raise RequestError("messages", messages, f"the prompt has more than {max_chars} characters", cure="Shorten them.")
        if status == FAILED:
            raise RequestError("messages", messages, f"the chat template of the model failed: {text}")
        return cut_at_mark(text) if continue_final_message else text

    async def close(self) -> None:
        """End the process, and wait for its end."""
        self._fail_waiting(UnavailableError("The model is unloaded.", cure="Retry later."))
        if self._process is not None:
            await self._process.end()

    async def _answer(self, rendering: Rendering) -> bytes:
        """Send a rendering to the process, which is started if it does not run, and wait for its answer."""
        self._waiting.append(rendering)
        if self._process is None:
            self._start()
        else:
            self._process.send(rendering.frame)
        return await rendering.answer

    def _start(self) -> None:
        """Start a process for the waiting renderings. They fail if that is impossible."""
        try:
            self._process = RenderingProcess(self._waiting, self._on_end)
        except OSError as error:  # too many processes, descriptors or too little memory
            self._fail_waiting(UnavailableError(f"The process for chat templates cannot start: {error}.", cure="Retry later."))
            return
        self._process.send(b"".join((self._first_frame, *(rendering.frame for rendering in self._waiting))))

    def _fail_waiting(self, error: StokerError) -> None:
        """Raise `error` in all waiting requests."""
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _on_end(self, status: int) -> None:
        """The process has ended: its rendering fails, or is repeated, and the others continue in a new process."""
        self._process = None
        if self._waiting:
            rendering = self._waiting[0]
            rendering.attempts += 1
            if status == -signal.SIGPROF or rendering.attempts == MAX_ATTEMPTS:
                reason = f"it needs more than {self._cpu_s:g} s" if status == -signal.SIGPROF else f"its process ended with status {status}"
                self._waiting.popleft().finish(bytes([FAILED]) + reason.encode())
        if self._waiting:
            self._start()


class RenderingProcess(asyncio.Protocol):
    """One process and the connection to it. Answers complete the first of the `waiting` renderings. `on_end` gets the exit status."""

    def __init__(self, waiting: deque[Rendering], on_end: Callable[[int], None]) -> None:
        self._waiting, self._on_end = waiting, on_end
        self._received, self._unsent = bytearray(), bytearray()
        self._transport: asyncio.Transport | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker.frontend.rendering.worker"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True, env=env.child_environment(),
            )  # fmt: skip
        self._connecting = asyncio.create_task(self._connect(ours))
        self._ended = asyncio.get_running_loop().create_future()

    async def _connect(self, connection: socket.socket) -> None:
        """Use the connection for the frames of this process."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, data: bytes) -> None:
        """Send frames. Nothing is sent after the process has ended: what waits then is sent to the next one."""
        if self._transport is None:
            self._unsent += data
        elif not self._transport.is_closing():  # uvloop's raises an error then
            self._transport.write(data)

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        await self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's callback: send what was sent before."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        self._transport.write(bytes(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """asyncio's callback: complete the renderings whose answers have arrived. An answer that cannot be valid ends the process."""
        self._received += data
        while self._waiting and len(self._received) >= LENGTH_BYTES:
            size = int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if not 0 < size <= self._waiting[0].max_bytes:
                self._process.kill()
                return
            if len(self._received) < LENGTH_BYTES + size:
                return
            answer = bytes(self._received[LENGTH_BYTES : LENGTH_BYTES + size])
            del self._received[: LENGTH_BYTES + size]
            self._waiting.popleft().finish(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback: the process has ended, or ends now."""
        self._process.kill()
        self._reporting = asyncio.create_task(self._report_end())

    async def _report_end(self) -> None:
        """Wait for the exit status, and report it."""
        status = await asyncio.to_thread(self._process.wait)
        self._ended.set_result(status)
        self._on_end(status)
