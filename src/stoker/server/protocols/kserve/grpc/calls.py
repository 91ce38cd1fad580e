"""The records of gRPC calls, for the log and traces: the same ids and headers as over HTTP, in the metadata of a call."""

from __future__ import annotations

import urllib.parse
from typing import Any

from stoker.server.prompt_export import PromptTransfer, transfer_of
from stoker.server.telemetry.record import CURRENT, RequestRecord, request_id_of
from stoker.server.telemetry.telemetry import Telemetry
from stoker.server.tenants.tenants import current_tenant

REQUEST_ID = b"x-request-id"
_PROBES = ("ServerLive", "ServerReady", "ModelReady")


class CallLog:
    """Opens the record of each call, and of each request of a stream, and closes it with the call's status."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def open(self, method: str, context: Any, message_id: str = "") -> RequestRecord:
        """The record of a call, or of one request of a stream, which `CURRENT` then holds.

        Its id is that of the message, or x-request-id of the metadata, or a new one.
        """
        headers = _headers(context)
        request_id = request_id_of(message_id.encode() or headers.get(REQUEST_ID))
        record = self._telemetry.open(
            headers, request_id=request_id, client=client_address(context.peer()), protocol="grpc", method="RPC", route=method
        )
        if (tenant := current_tenant()) is not None:
            record.key = tenant.name
        CURRENT.set(record)
        return record

    def identify(self, record: RequestRecord, context: Any, message_id: str) -> None:
        """Use the id of a call's message as that of its record, unless the metadata has an id, which the client expects back."""
        if message_id and REQUEST_ID not in _headers(context):
            record.request_id = request_id_of(message_id.encode())

    def transfer(self, context: Any) -> PromptTransfer | None:
        """The transfer of the prompt whose ticket is in the metadata. Raises RequestError for an invalid ticket."""
        return transfer_of(_headers(context))

    def close(self, record: RequestRecord, status: int) -> None:
        """The call, or the request of a stream, has ended with this HTTP status."""
        self._telemetry.close(record, status, probe=record.route in _PROBES)


def _headers(context: Any) -> dict[bytes, bytes]:
    """The metadata of a call that are texts."""
    return {name.encode(): value.encode() for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def response_metadata(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call: x-request-id, and what `RequestRecord.response_headers` has."""
    headers = [(REQUEST_ID, record.request_id.encode()), *record.response_headers()]
    return tuple((name.decode(), value.decode()) for name, value in headers)


def client_address(peer: str) -> str:
    """The address in gRPC's description of a peer, such as ipv4:127.0.0.1:5000 or ipv6:[::1]:5000 with the brackets as %5B and %5D."""
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind
