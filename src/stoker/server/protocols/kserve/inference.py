"""One inference as both wires hand it to a model, and what a model answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stoker.server.protocols.kserve.model_config import Tensor, TritonModel
from stoker.server.protocols.kserve.tensors.dtypes import text_array

TEXT = "text_output"
MAX_CACHED = 256

Parameters: TypeAlias = dict[str, Any]  # bool, int, float or str by name
Tensors: TypeAlias = dict[str, np.ndarray]


class Inference(msgspec.Struct, kw_only=True):
    """A checked request. `inputs` are by role (a tensor's name in 0.18), with the batch axis where the model has one."""

    model: TritonModel
    request_id: str = ""  # the client's; empty when it gave none
    inputs: Tensors = {}
    parameters: Parameters = {}
    outputs: tuple[str, ...] = ()  # names asked for; empty: all
    single: bool = False  # the caller takes exactly one response

    @property
    def known_id(self) -> str:
        return self.request_id or "<id_unknown>"


class Response(msgspec.Struct, kw_only=True):
    """One response: tensors by name in declared order. An empty one only tells that the request has ended."""

    outputs: Tensors = {}
    parameters: Parameters = {}
    final: bool = False  # no response of this request follows
    row: int = 0  # of the batch
    index: int = 0  # of the row's sequences
    text: str | None = None  # where the text alone is new: text_output [1, 1], the last tensor; `outputs` are the others, shared and kept

    @property
    def shows(self) -> bool:
        return self.text is not None or bool(self.outputs)

    def tensors(self) -> Tensors:
        """All of them, the text too."""
        return self.outputs if self.text is None else self.outputs | {TEXT: text_array([self.text.encode()], (1, 1))}


Responses: TypeAlias = AsyncGenerator[list[Response], None]  # a list a wake-up
Run: TypeAlias = Callable[[Inference], Responses]
Answer: TypeAlias = Callable[[Inference], Awaitable[list[Response]]]


class Unchanging:
    """What an encoder made of everything in a response but its text, for the responses whose other tensors are the same objects: in a
    stream of text that is every one."""

    def __init__(self) -> None:
        self._cached: dict[tuple[Any, ...], tuple[Tensors, Any]] = {}
        self._last: tuple[Tensors, Parameters, bool, Any] = ({}, {}, False, None)

    def get(self, response: Response, make: Callable[[Response], Any]) -> Any:
        """`make(response)`, or what it gave for another with the same tensors and parameters."""
        outputs, parameters, final, made = self._last
        if response.outputs is outputs and response.parameters is parameters and response.final is final:
            return made
        key = (id(response.outputs), response.final, *response.parameters.items())
        if (cached := self._cached.get(key)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            cached = self._cached[key] = (response.outputs, make(response))  # holding the tensors keeps their id theirs
        self._last = (response.outputs, response.parameters, response.final, cached[1])
        return cached[1]


class ServedModel(msgspec.Struct, kw_only=True):
    """A model that clients see, and what runs it. The last response of `run` is final; none at all is an answer, too."""

    model: TritonModel
    run: Run
    ready: Callable[[], bool]
    answer: Answer | None = None  # what `run` gives, all at once, where that is quicker
    members: tuple[str, ...] = ()  # models that a request of this one counts for, too
    unary: bool = False  # a decoupled model that may be asked for its one response
    version: str = "1"
    unloaded: bool = False
    inputs: dict[str, Tensor] = {}  # the model's, by name
    encoded: dict[str, Unchanging] = {}  # of requests without an id of their own, by wire

    def __post_init__(self) -> None:
        self.inputs = {tensor.name: tensor for tensor in self.model.inputs}

    @property
    def state(self) -> str:
        return "UNAVAILABLE" if self.unloaded or not self.ready() else "READY"


def unchanging(served: ServedModel, inference: Inference, wire: str) -> Unchanging:
    """Shared by all requests of a model but those with an id, for their responses carry it."""
    return Unchanging() if inference.request_id else served.encoded.setdefault(wire, Unchanging())
