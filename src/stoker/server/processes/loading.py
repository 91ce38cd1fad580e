"""The server before its engine exists: while a model is downloaded and built, all endpoints are open and report the progress."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any, NoReturn

import msgspec

from stoker.base.errors import UnavailableError
from stoker.frontend.repository import ModelRepository, ModelState
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.processes.listeners import with_metrics_port
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings


class LoadingServer:
    """A context manager that answers HTTP requests on `listeners` in a thread, with the model `name` in the state LOADING.

    The sockets stay open afterwards, so that connections made in between wait for the actual server.
    """

    def __init__(self, listeners: list[socket.socket], settings: ServerSettings, name: str) -> None:
        repository = ModelRepository()
        self._model = repository.register(name, _not_built, _not_built)
        self._model.state, self._model.reason = ModelState.LOADING, "being fetched and built"
        undrained = msgspec.structs.replace(with_metrics_port(settings, listeners), drain_timeout_s=0.0)
        self._context = Context(repository, undrained, FrontendMetrics(), cleanup=contextlib.ExitStack(), shared={})
        self._server = HttpServer(http_config(make_app(self._context), undrained))
        self._sockets = [listener.dup() for listener in listeners]
        self._thread = threading.Thread(target=self._run, name="stoker-loading", daemon=True)

    def __enter__(self) -> LoadingServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._context.cleanup.close()

    def report_progress(self, stage: str, done: int, total: int | None) -> str:
        """Set the reason that clients receive, and return it: `stage`, and the percentage if `total` is known. For any thread."""
        self._model.reason = f"{stage}: {100 * done // total} %" if total else stage
        return self._model.reason

    def _run(self) -> None:
        """The thread: serve HTTP until `should_exit` is set."""
        asyncio.run(self._server.serve(sockets=self._sockets))


async def _not_built(*args: Any) -> NoReturn:
    """Replaces loading and unloading, for which there is no engine yet."""
    raise UnavailableError("the engine is not built yet.", cure="Wait until the server is ready.")
