"""Diagnosis of a running server, for its operator: the scheduler's state, and profiles of its steps. The routes require the admin key."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

from stoker.base.errors import RequestError, UnavailableError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Whole
from stoker.base.profile_query import BUSY, MAX_STEPS, MAX_TIME_S
from stoker.server.errors import BusyError, Failure
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.operation import OBJECT, STRING, Operation, record
from stoker.server.protocol import Endpoint, Protocol
from stoker.server.tenants.admin_key import check_admin_key

CHUNK_BYTES = 1 << 20
_QUERY = {"steps": (Whole(1, MAX_STEPS), 50), "time_s": (Whole(1, int(MAX_TIME_S)), 60)}  # parameter: values and default


class Debug(Protocol):
    """/debug/state and /debug/profile."""

    prefixes = ("/debug",)
    operations = {
        ("GET", "/debug/state"): Operation(summary="The state of the scheduler, without contents of requests", response=OBJECT),
        ("POST", "/debug/profile"): Operation(
            summary="A trace of the next steps for Perfetto, of CPU and GPU and of all ranks",
            query={"steps": {"type": "integer", "default": 50}, "time_s": {"type": "integer", "default": 60}},
            response=OBJECT,
        ),
    }
    error_schema = record({"error": STRING}, "DebugError")

    def endpoints(self) -> list[Endpoint]:
        """The routes, which API keys do not open."""
        return [Endpoint("GET", "/debug/state", self.state, open=True), Endpoint("POST", "/debug/profile", self.profile, open=True)]

    async def state(self, http: RequestContext) -> None:
        """GET /debug/state: the executor's state, without steps and without contents of requests."""
        check_admin_key(http.headers, self.context.settings.admin_key)
        service = self.context.default_service()
        state = await service.live(detail=True)
        await http.respond(200, msgspec.json.encode({"model": service.model_name, **msgspec.to_builtins(state)}))

    async def profile(self, http: RequestContext) -> None:
        """POST /debug/profile: wait until the steps have run, and send their trace. Raises BusyError while another one is recorded."""
        check_admin_key(http.headers, self.context.settings.admin_key)
        values = _read_query(http.query)
        result = await self.context.default_service().profile(values["steps"], values["time_s"])
        if result.error == BUSY:
            raise BusyError(f"{BUSY}.", cure="Wait for its end.")
        if result.error:
            raise UnavailableError(f"no profile was recorded: {result.error}.")
        headers = ((b"content-disposition", b'attachment; filename="stoker-profile.json"'), (b"x-profiled-steps", b"%d" % result.num_steps))
        try:
            with Path(result.path).open("rb") as file:
                await http.open_stream(JSON, headers=headers)
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    await http.send(chunk)
            await http.close_stream()
        finally:
            shutil.rmtree(Path(result.path).parent, ignore_errors=True)

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})


def _read_query(query: bytes) -> dict[str, int]:
    """The parameters of a profile. Raises RequestError."""
    values = {name: default for name, (_, default) in _QUERY.items()}
    for name, text in parse_qsl(query.decode("latin-1")):
        if name not in _QUERY:
            raise RequestError(name, text, f"it is unknown; the parameters are {', '.join(_QUERY)}")
        try:
            values[name] = _QUERY[name][0].parse(text)
        except InvalidValueError as error:
            raise RequestError(name, text, str(error.limit)) from None
    return values
