"""A client of a gRPC stream that disconnects while a message is written to it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from scripted_service import ScriptedService, make_context
from tritonclient.grpc import service_pb2 as pb

from stoker.server.protocols.kserve.core import Core
from stoker.server.protocols.kserve.grpc.server import KServeGRPC


class Disconnecting:
    """The context of a call whose client disconnects during the second write. gRPC raises either error, depending on the time."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_writes = 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: bytes) -> None:
        self.num_writes += 1
        if self.num_writes > 1:
            raise self.error


@pytest.mark.parametrize("error", [grpc.aio.UsageError("RPC already finished"), grpc.aio.InternalError("Failed execute_batch")])
async def test_a_disconnect_during_a_write_is_no_error(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stoker").propagate = True
    service = ScriptedService("abcdef")
    request = pb.ModelInferRequest(model_name="ensemble")
    for name, datatype, field, value in (
        ("text_input", "BYTES", "bytes_contents", b"hi"),
        ("max_tokens", "INT32", "int_contents", 6),
        ("stream", "BOOL", "bool_contents", True),
    ):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        getattr(tensor.contents, field).append(value)

    async def requests() -> AsyncIterator[bytes]:
        yield request.SerializeToString()

    context: Any = Disconnecting(error)
    await KServeGRPC(Core.of(await make_context(service))).stream_infer(requests(), context)
    assert context.num_writes == 2 and len(service.left) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
