"""Answers while an engine is fetched and built: every door is open, and says that its model is loading, and how far that is."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any, NoReturn

import msgspec

from stoker.base.errors import UnavailableError
from stoker.frontend.repository import ModelRepository, ModelState
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.processes.supervisor import with_metrics_port
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings


class Waiting:
    """A context manager. Its thread answers at `listeners`, which stay open afterwards: connections that come later wait for the server.

    `tell` is a progress callback, of any thread: what is being done, how much of it, of how much.
    """

    def __init__(self, listeners: list[socket.socket], settings: ServerSettings, name: str) -> None:
        repository = ModelRepository()
        self._model = repository.register(name, _never, _never)
        self._model.state, self._model.reason = ModelState.LOADING, "being fetched and built"
        brief = msgspec.structs.replace(with_metrics_port(settings, listeners), drain_timeout_s=0.0)
        self._server = HttpServer(http_config(make_app(Context(repository, brief, FrontendMetrics())), brief))
        self._sockets = [listener.dup() for listener in listeners]
        self._thread = threading.Thread(target=self._run, name="stoker-waiting", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def tell(self, stage: str, done: int, total: int | None) -> None:
        self._model.reason = f"{stage}: {100 * done // total} %" if total else stage

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=self._sockets))


async def _never(*args: Any) -> NoReturn:
    raise UnavailableError("the engine is not built yet.", cure="Wait until the server is ready.")
