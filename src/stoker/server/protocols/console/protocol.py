"""The web console: a page at / and /console, and the JSON that it reads.

The page itself needs no API key, because it contains nothing about the server. Every route under /console/api needs the admin key if the
server has one, and otherwise an API key. Chat uses the routes of OpenAI's API, and loading of models those of KServe.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterable
from urllib.parse import parse_qs

import msgspec

from stoker.base.errors import RequestError, UnavailableError
from stoker.base.logging import LogLine, recent_lines
from stoker.server.errors import Failure
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.metrics.live_view import LiveView
from stoker.server.processes.tasks import EXECUTOR
from stoker.server.protocol import Context, Endpoint, Handler, Protocol
from stoker.server.protocols.console.engine_card import engine_card
from stoker.server.protocols.console.openapi import ERROR, OPERATIONS
from stoker.server.protocols.console.static_files import INDEX, NOT_CACHED, StaticFiles
from stoker.server.tenants.admin_key import check_admin_key

API = "/console/api"


class Console(Protocol):
    """The page, its files and its API."""

    prefixes = ("/console",)
    operations = OPERATIONS
    error_schema = ERROR

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = StaticFiles()
        self._live = LiveView(context)

    def endpoints(self) -> list[Endpoint]:
        has_admin_key = self.context.settings.admin_key is not None
        handlers = {"server": self.server, "live": self.live, "engine": self.engine, "log": self.log}
        return [
            Endpoint("GET", "/", self.page, open=True),
            Endpoint("GET", "/console", self.page, open=True),
            *(Endpoint("GET", f"{API}/{name}", self._for_operators(handler), open=has_admin_key) for name, handler in handlers.items()),
            Endpoint("GET", "/console/{name}", self.file, open=True),
        ]

    def _for_operators(self, handler: Handler) -> Handler:
        """The handler, which requires the admin key if the server has one."""
        if self.context.settings.admin_key is None:
            return handler

        async def check_and_handle(http: RequestContext) -> None:
            """Raises AuthenticationError without the admin key."""
            check_admin_key(http.headers, self.context.settings.admin_key)
            await handler(http)

        return check_and_handle

    async def page(self, http: RequestContext) -> None:
        """GET / and /console: the page."""
        await self._files.respond(http, INDEX)

    async def file(self, http: RequestContext) -> None:
        """GET /console/NAME: the script, the style or the icon of the page."""
        await self._files.respond(http, http.path["name"])

    async def server(self, http: RequestContext) -> None:
        """GET /console/api/server: the version, and what the page can offer."""
        settings = self.context.settings
        answer = {
            "version": importlib.metadata.version("stoker"),
            "protocols": settings.protocols,
            "model_control": getattr(settings.options, "model_control", "none"),
            "drain_timeout_s": settings.drain_timeout_s,
        }
        await self._respond(http, answer)

    async def live(self, http: RequestContext) -> None:
        """GET /console/api/live: counters and latencies; with detail=1 sequences and blocks; with first_step=N the steps from N on."""
        first_step = _number(http, "first_step")
        detail = bool(_number(http, "detail"))
        await self._respond(http, await self._live.answer(detail, int(first_step) if first_step is not None else None))

    async def engine(self, http: RequestContext) -> None:
        """GET /console/api/engine: the engine card, and the memory budget of its executor."""
        service = self.context.default_service()
        place = self.context.coordination.values.get(EXECUTOR)
        if place is None:
            raise UnavailableError("the directory of the engine is not available.")
        card = await asyncio.to_thread(engine_card, place.engine)
        info = service.info
        await self._respond(http, {"name": service.model_name, **card, "memory": info.memory, "device": info.device})

    async def log(self, http: RequestContext) -> None:
        """GET /console/api/log?after=T: log lines of this frontend, of the supervisor and of the executor after T, seconds since 1970."""
        after_s = _number(http, "after") or 0.0
        lines = {"frontend": recent_lines(after_s), "supervisor": await self.context.coordination.log(after_s)}
        try:
            lines["executor"] = (await self.context.default_service().live(log_after_s=after_s)).log
        except UnavailableError:
            lines["executor"] = []
        await self._respond(http, {"lines": _merge(lines)})

    async def _respond(self, http: RequestContext, answer: object) -> None:
        """Respond with JSON that is not cached."""
        await http.respond(200, msgspec.json.encode(answer), JSON, NOT_CACHED)

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})


def _number(http: RequestContext, name: str) -> float | None:
    """A finite number of the query string that is not negative. None if it is absent. Raises RequestError."""
    values = parse_qs(http.query.decode("latin-1")[:1000]).get(name)
    if not values:
        return None
    try:
        number = float(values[-1])
    except ValueError:
        number = -1.0
    if not 0 <= number < 1 << 53:
        raise RequestError(name, values[-1], "it is a number that is not negative")
    return number


def _merge(lines: dict[str, list[LogLine]]) -> Iterable[dict[str, object]]:
    """The lines of all processes in the order of time, each with the name of its process. Lines of a shared process appear once."""
    merged, pids = [], set[int]()
    for process, group in lines.items():
        merged += [{**msgspec.structs.asdict(line), "process": process} for line in group if line.pid not in pids]
        pids |= {line.pid for line in group}
    return sorted(merged, key=lambda line: line["time_s"])  # type: ignore[arg-type, return-value]
