"""One inference as both wires hand it to a model, and what a model answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stoker.server.schemas.triton_models import TritonModel

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


Responses: TypeAlias = AsyncGenerator[list[Response], None]  # a list a wake-up
Run: TypeAlias = Callable[[Inference], Responses]


Kept: TypeAlias = tuple[tuple[np.ndarray, ...], tuple[tuple[str, Any], ...], Any]


class Unchanging:
    """What an encoder made of everything in a response but its last tensor, kept for the responses whose other tensors are the same
    read-only arrays: in a stream of text that is every one. A stream of 32 took a third less time for it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Kept] = {}

    def get(self, response: Response, make: Callable[[list[str]], Any], *, last: str) -> Any:
        """`make(names)` for the tensors before `last`, or what it gave before; None where it cannot be kept."""
        names = list(response.outputs)
        if not names or names[-1] != last:
            return None
        arrays = tuple(response.outputs.values())[:-1]
        if any(array.flags.writeable for array in arrays):
            return None
        named = tuple(response.parameters.items())
        key = (*map(id, arrays), *named, response.final, response.outputs[last].shape)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = (arrays, named, make(names[:-1]))  # holding the arrays keeps their ids theirs
        return found[2]


class ServedModel(msgspec.Struct, kw_only=True):
    """A model that clients see, and what runs it. The last response of `run` is final; none at all is an answer, too."""

    model: TritonModel
    run: Run
    ready: Callable[[], bool]
    members: tuple[str, ...] = ()  # models that a request of this one counts for, too
    unary: bool = False  # a decoupled model that may be asked for its one response
    version: str = "1"
    unloaded: bool = False

    @property
    def state(self) -> str:
        return "UNAVAILABLE" if self.unloaded or not self.ready() else "READY"
