"""The gRPC client of the chaos test: streams and whole answers of KServe's ModelStreamInfer. Needs grpcio and tritonclient."""

from __future__ import annotations

import asyncio
import time

import grpc
from chaos.requests_by_protocol import Case
from chaos.wire import Manners
from tritonclient.grpc import service_pb2, service_pb2_grpc

Request = service_pb2.ModelInferRequest
ENDED_EARLY = "Internal error from Core"  # what grpc.aio reports if the deadline passes while it sends


class RpcAnswer:
    """What a client received: `ended` as in wire.Response, or refused, with the reason in `detail`."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = "cut"
        self.detail = ""
        self.started_s = self.ended_s = time.monotonic()


def message(case: Case, stream: bool) -> Request:
    """The request of a case."""
    request = Request(model_name="ensemble")
    values = {
        "text_input": ("BYTES", "bytes_contents", case.prompt.encode()),
        "max_tokens": ("INT32", "int_contents", case.max_tokens),
        "stream": ("BOOL", "bool_contents", stream),
    }
    if case.seed is None:
        values["top_k"] = ("INT32", "int_contents", 1)
    else:
        values["temperature"] = ("FP32", "fp32_contents", 0.9)
        values["top_k"] = ("INT32", "int_contents", 0)
        values["top_p"] = ("FP32", "fp32_contents", 1.0)
        values["random_seed"] = ("UINT64", "uint64_contents", case.seed)
    for name, (kind, field, value) in values.items():
        tensor = request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        getattr(tensor.contents, field).append(value)
    return request


class Channel:
    """A channel of one client. `infer` opens a stream per request."""

    def __init__(self, host: str, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"{host}:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, case: Case, stream: bool, manners: Manners, deadline_s: float) -> RpcAnswer:
        """Send a case and read its responses. Never raises for what the server does."""
        answer = RpcAnswer()
        leaves = manners.leave_s is not None
        call = self._stub.ModelStreamInfer(iter([message(case, stream)]), timeout=manners.leave_s if leaves else deadline_s)
        try:
            async for response in call:
                if response.error_message:
                    answer.ended, answer.detail = "refused", response.error_message
                    return answer
                self._add(answer, response.infer_response)
            answer.ended = "complete"
        except grpc.aio.AioRpcError as error:
            answer.detail = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or (leaves and error.details() == ENDED_EARLY):
                answer.ended = "left" if leaves else "late"
            elif not (error.code() is grpc.StatusCode.UNAVAILABLE and _is_transport(error.details() or "")):
                answer.ended = "refused"
        except asyncio.CancelledError:  # grpc.aio raises it, too, if the deadline passes between two of its steps
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            answer.ended, answer.detail = ("left" if leaves else "cut"), "the call was cancelled"
        finally:
            call.cancel()
            answer.ended_s = time.monotonic()
        return answer

    async def close(self) -> None:
        await self._channel.close()

    @staticmethod
    def _add(answer: RpcAnswer, response: service_pb2.ModelInferResponse) -> None:
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "text_output":
                answer.text += raw[4:].decode("utf-8", "replace")  # one string after its length


def _is_transport(details: str) -> bool:
    """Whether gRPC's client reports a lost or refused connection, instead of an error that the server sent."""
    return any(part in details.lower() for part in ("socket", "connect", "goaway", "recvmsg", "stream removed", "broken pipe", "reset"))
