"""One inference, independent of HTTP and gRPC: the request to a model and its responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stoker.server.protocols.kserve.model_config import ModelStatus, Tensor, TritonModel
from stoker.server.protocols.kserve.tensors.dtypes import text_array

TEXT = "text_output"
TEXT_SHAPE = (1,)  # of one text: postprocessing flattens rows and beams, so its output has no batch axis
MAX_CACHED = 256

Parameters: TypeAlias = dict[str, Any]  # bool, int, float or str by name
Tensors: TypeAlias = dict[str, np.ndarray]


class Inference(msgspec.Struct, kw_only=True):
    """A checked request. `inputs` are by role (a tensor's name in release 0.18), with a batch axis if the model has one."""

    model: TritonModel
    request_id: str = ""  # of the client; empty if it sent none
    inputs: Tensors = {}
    parameters: Parameters = {}
    outputs: tuple[str, ...] = ()  # requested names; empty: all
    placements: dict[str, Any] = {}  # output → its Placement in shared memory
    single: bool = False  # the caller accepts exactly one response

    @property
    def shown_id(self) -> str:
        """The id in error messages, as in Triton."""
        return self.request_id or "<id_unknown>"


class Response(msgspec.Struct, kw_only=True):
    """One response: tensors by name, in declared order. A response without tensors only reports the end of the request."""

    outputs: Tensors = {}
    parameters: Parameters = {}
    final: bool = False  # no response of this request follows
    row: int = 0  # index in the batch
    index: int = 0  # index of the sequence in its row
    # If not None: text_output of TEXT_SHAPE, the last tensor. `outputs` are then the other tensors, which many responses share.
    text: str | None = None

    @property
    def has_outputs(self) -> bool:
        """False for a response that only reports the end of the request."""
        return self.text is not None or bool(self.outputs)

    def tensors(self) -> Tensors:
        """All output tensors, including the text."""
        return self.outputs if self.text is None else self.outputs | {TEXT: text_array([self.text.encode()], TEXT_SHAPE)}


Responses: TypeAlias = AsyncGenerator[list[Response], None]  # each item is a list of responses that are available together
Run: TypeAlias = Callable[[Inference], Responses]
Complete: TypeAlias = Callable[[Inference], Awaitable[list[Response]]]


class EncodingCache:
    """The encodings of responses except for their text.

    Responses share an encoding if their other tensors are the same objects. In a stream of text, all responses do.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[Any, ...], tuple[Tensors, Any]] = {}
        self._last: tuple[Tensors, Parameters, bool, Any] = ({}, {}, False, None)

    def get(self, response: Response, encode: Callable[[Response], Any]) -> Any:
        """`encode(response)`, or its earlier result for a response with the same tensors and parameters."""
        outputs, parameters, final, encoded = self._last
        if response.outputs is outputs and response.parameters is parameters and response.final is final:
            return encoded
        key = (id(response.outputs), response.final, *response.parameters.items())
        if (cached := self._cached.get(key)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            cached = self._cached[key] = (response.outputs, encode(response))  # the reference keeps the id unique
        self._last = (response.outputs, response.parameters, response.final, cached[1])
        return cached[1]


class RunningRequests:
    """The requests in flight of one model. As a context manager it counts one while the block runs."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *exc: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def drained(self) -> None:
        """Return when no request is in flight."""
        if self._count:
            await self._idle.wait()


class ServedModel(msgspec.Struct, kw_only=True):
    """A model as clients see it, and the functions that run it. The last response of `run` is final; there may be no response."""

    model: TritonModel
    run: Run
    ready: Callable[[], bool]
    complete: Complete | None = None  # all responses of `run` in one call, which costs less than a generator
    members: tuple[str, ...] = ()  # models whose counters a request of this one also increments
    unary: bool = False  # a decoupled model that also accepts requests for a single response
    version: str = "1"
    status: ModelStatus = ModelStatus()  # as explicit model control sets it
    requests: RunningRequests = msgspec.field(default_factory=RunningRequests)
    inputs: dict[str, Tensor] = {}  # inputs of `model` by name
    encodings: dict[str, EncodingCache] = {}  # of requests without an id, by response format

    def __post_init__(self) -> None:
        self.inputs = {tensor.name: tensor for tensor in self.model.inputs}

    @property
    def state(self) -> str:
        """The state in the repository index. UNAVAILABLE while the model is loaded but its engine is not ready."""
        return "UNAVAILABLE" if self.loaded and not self.ready() else self.status.state

    @property
    def loaded(self) -> bool:
        """Whether the model accepts requests, as far as model control is concerned."""
        return self.status.state == "READY"


def encoding_cache(served: ServedModel, inference: Inference, response_format: str) -> EncodingCache:
    """The cache for a request. Requests without an id share the one of the model; responses of others contain their id."""
    return EncodingCache() if inference.request_id else served.encodings.setdefault(response_format, EncodingCache())
