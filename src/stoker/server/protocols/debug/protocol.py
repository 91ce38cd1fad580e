"""Diagnosis of a running server, for its operator: the state of the scheduler. The routes require the admin key."""

from __future__ import annotations

import hmac

import msgspec

from stoker.server.errors import AuthenticationError, Failure, ForbiddenError
from stoker.server.http.request_context import RequestContext
from stoker.server.operation import OBJECT, STRING, Operation, record
from stoker.server.protocol import Endpoint, Protocol
from stoker.server.tenants.accepted_keys import sent_key
from stoker.server.tenants.key_file import digest_of


class Debug(Protocol):
    """/debug/state."""

    prefixes = ("/debug",)
    operations = {
        ("GET", "/debug/state"): Operation(summary="The state of the scheduler, without contents of requests", response=OBJECT),
    }
    error_schema = record({"error": STRING}, "DebugError")

    def endpoints(self) -> list[Endpoint]:
        """The routes, which API keys do not open."""
        return [Endpoint("GET", "/debug/state", self.state, open=True)]

    async def state(self, http: RequestContext) -> None:
        """GET /debug/state: the executor's state, without steps and without contents of requests."""
        self._check_admin(http)
        service = self.context.default_service()
        state = await service.live()
        await http.respond(200, msgspec.json.encode({"model": service.model_name, **msgspec.to_builtins(state)}))

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})

    def _check_admin(self, http: RequestContext) -> None:
        """Raise ForbiddenError if the server has no admin key, and AuthenticationError unless the request has it."""
        if (expected := self.context.settings.admin_key) is None:
            raise ForbiddenError("the server has no admin key.", cure="Start it with --admin-key-file or STOKER_ADMIN_KEY.")
        if not hmac.compare_digest(digest_of(sent_key(http.headers)), digest_of(expected)):
            raise AuthenticationError("the admin key is missing or wrong.", cure="Send the header Authorization: Bearer KEY.")
