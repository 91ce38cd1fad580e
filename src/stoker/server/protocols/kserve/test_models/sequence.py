"""`simple_sequence`, `simple_dyna_sequence` and `simple_string_dyna_sequence`: the requests of a sequence have one id.

simple_sequence adds 1 to the first value of a sequence. simple_dyna_sequence also adds the id to the last value.
simple_string_dyna_sequence returns the sum of the values so far, and adds the id to the last one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from stoker.server.coordination import Coordination
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel

PREFIX = "kserve/sequence/"  # of values of the coordination: the sum so far by model and id
MAX_SEQUENCES = 1024
MAX_ID_CHARS = 128


def _model(name: str) -> TritonModel:
    """A model with an INT32 input and output of shape [1]."""
    tensors = [Tensor(name=tensor, dtype="INT32", dims=(1,)) for tensor in ("INPUT", "OUTPUT")]
    return TritonModel(name=name, kind="test", backend="python", max_batch_size=8, inputs=tuple(tensors[:1]), outputs=tuple(tensors[1:]))


MODELS = tuple(map(_model, ("simple_sequence", "simple_dyna_sequence", "simple_string_dyna_sequence")))


class SequenceRunner:
    """Runs the three models. All frontends have the state, because the requests of a sequence may use several connections."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # and its number of requests in this process, by sequence

    async def run(self, inference: Inference) -> Responses:
        """One request of a sequence. Those of one connection run in the order of their arrival."""
        key = f"{PREFIX}{inference.model.name}/{_sequence_id(inference)}"
        lock, num_users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, num_users + 1)
        try:
            async with lock:
                outputs = await self._step(key, inference)
        finally:
            lock, num_users = self._locks.pop(key)
            if num_users > 1:
                self._locks[key] = (lock, num_users - 1)
        yield [Response(outputs=outputs, final=True)]

    async def _step(self, key: str, inference: Inference) -> dict[str, np.ndarray]:
        """Run one request of a sequence, and store its new total, or remove it at the end.

        Raises TritonError if the sequence has not started, and when too many sequences are running. `key` is the name of the total.
        """
        start, end = (inference.parameters.get(f"sequence_{name}") is True for name in ("start", "end"))
        name, sequence_id = inference.model.name, _sequence_id(inference)
        total = self._coordination.values.get(key)
        if total is None and not start:
            raise TritonError(
                f"inference request for sequence {sequence_id} to model '{name}' must specify the START flag on the first request of the "
                "sequence"
            )
        if total is None and sum(key.startswith(PREFIX) for key in self._coordination.values) >= MAX_SEQUENCES:
            raise TritonError(f"{MAX_SEQUENCES} sequences are running, which is the limit. End some.", 503)
        values = inference.inputs["INPUT"].astype(np.int64)
        added = values if start else values + (total or 0)
        result = added if name == "simple_string_dyna_sequence" else values + start
        if end and name != "simple_sequence":
            result = result + _number(sequence_id)
        await self._coordination.remove(key)
        if not end:
            await self._coordination.put(key, int(added.flat[0]))
        return {"OUTPUT": result.astype(np.int32)}


def _sequence_id(inference: Inference) -> Any:
    """The id of the sequence: a number or a text. Raises TritonError."""
    sequence_id = inference.parameters.get("sequence_id", 0)
    if not isinstance(sequence_id, (int, str)) or isinstance(sequence_id, bool) or sequence_id in (0, ""):
        raise TritonError(f"inference request to model '{inference.model.name}' must specify a non-zero or non-empty correlation ID")
    if len(str(sequence_id)) > MAX_ID_CHARS:
        raise TritonError(f"a correlation ID has at most {MAX_ID_CHARS} characters")
    return sequence_id


def _number(sequence_id: int | str) -> int:
    """The lowest 32 bits of a numeric sequence id. Raises TritonError for a text that is not a number."""
    if isinstance(sequence_id, str) and not (sequence_id.isascii() and sequence_id.isdigit()):
        raise TritonError(f"the correlation ID {sequence_id!r} must be a whole number for this model")
    return int(sequence_id) & 0xFFFFFFFF
