"""Traces of KServe requests in Triton's format: samples requests by the trace settings, and writes their timestamps and tensors.

An ensemble is one trace, because Stoker runs its models together.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker.base.logging import get_logger
from stoker.server.protocols.kserve.inference import Inference, Response, ServedModel, Tensors
from stoker.server.protocols.kserve.tensors.dtypes import dtype_name
from stoker.server.protocols.kserve.tracing import file
from stoker.server.protocols.kserve.tracing.settings import TraceSettings
from stoker.server.telemetry.record import CURRENT, RequestRecord

log = get_logger(__name__)

WRITE_S = 0.25  # between the end of a request and the time its trace is in the file, without log_frequency
MAX_PENDING = 1000  # traces that wait for log_frequency
MAX_DATA_CHARS = 8192  # of one tensor


class Tracer:
    """Samples requests of this process. Each frontend counts trace_rate and trace_count for itself."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._ids = itertools.count(os.getpid() << 24)  # unique among the frontends, and exact as a JSON number
        self._seen: dict[str, int] = {}  # requests by model, of those that could be traced
        self._collected: dict[str, tuple[str, int]] = {}  # by model: the trace_count for which traces were counted, and their number
        self._pending: dict[str, list[Trace]] = {}  # by file
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, served: ServedModel, inference: Inference) -> Trace | None:
        """The trace of a request that begins, or None if it is not sampled. It ends with the record of the request."""
        record = CURRENT.get()
        if record is None or not self._settings.enabled:
            return None
        settings = self._settings.values(served.model.name)
        if settings["trace_level"] == ["OFF"] or not self._sample(served.model.name, settings):
            return None
        record.measured = True
        trace = Trace(next(self._ids), served, inference, settings, record)
        record.on_close.append(lambda: self._end(trace))
        return trace

    def close(self) -> None:
        """Write all traces that are not written yet."""
        for path, traces in self._pending.items():
            self._write(path, traces, indexed=False)
        self._pending = {}

    def _sample(self, model: str, settings: dict[str, Any]) -> bool:
        """Whether the next request of a model is traced: each trace_rate-th one, up to trace_count."""
        count, collected = self._collected.get(model, ("", 0))
        collected = collected if count == settings["trace_count"] else 0
        if 0 <= int(settings["trace_count"]) <= collected:
            return False
        self._seen[model] = self._seen.get(model, 0) + 1
        if self._seen[model] % int(settings["trace_rate"]):
            return False
        self._collected[model] = (settings["trace_count"], collected + 1)
        return True

    def _end(self, trace: Trace) -> None:
        """The request of a trace has ended: write the trace, now or with others."""
        trace.ended = time.monotonic()
        path, frequency = trace.settings["trace_file"], min(int(trace.settings["log_frequency"]), MAX_PENDING)
        traces = self._pending.setdefault(path, [])
        traces.append(trace)
        if frequency and len(traces) >= frequency:
            self._write(path, self._pending.pop(path), indexed=True)
        elif not frequency and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write_pending)

    def _write_pending(self) -> None:
        """Write the traces that do not wait for log_frequency."""
        self._timer = None
        for path, traces in list(self._pending.items()):
            if any(int(trace.settings["log_frequency"]) == 0 for trace in traces):
                self._write(path, self._pending.pop(path), indexed=False)

    def _write(self, path: str, traces: list[Trace], *, indexed: bool) -> None:
        """Write traces to a file, or to the next of the files with a number. An error is logged, and the traces are dropped."""
        if not traces:
            return
        try:
            (file.write_next if indexed else file.append)(Path(path), [entry for trace in traces for entry in trace.entries()])
        except OSError as error:
            log.error("%d traces could not be written to %s: %s", len(traces), path, error.strerror)


class Trace:
    """The trace of one request."""

    def __init__(self, trace_id: int, served: ServedModel, inference: Inference, settings: dict[str, Any], record: RequestRecord) -> None:
        self.settings = settings
        self.ended = 0.0
        self._id = trace_id
        self._head = {"id": trace_id, "model_name": served.model.name, "model_version": int(served.version)}
        self._record = record
        self._begun = time.monotonic()
        self._tensors: list[dict[str, Any]] = []
        if inference.request_id:
            self._head["request_id"] = inference.request_id
        if "TENSORS" in settings["trace_level"]:
            self._add("TENSOR_QUEUE_INPUT", inference.inputs)

    def add(self, batch: list[Response]) -> None:
        """Note the tensors of responses, if the level has TENSORS."""
        if "TENSORS" in self.settings["trace_level"]:
            for response in batch:
                self._add("TENSOR_BACKEND_OUTPUT", response.tensors())

    def entries(self) -> list[dict[str, Any]]:
        """The entries of the file."""
        timestamps = self._timestamps() if "TIMESTAMPS" in self.settings["trace_level"] else []
        times = [{"id": self._id, "timestamps": [{"name": name, "ns": int(seconds * 1e9)}]} for name, seconds in timestamps]
        return [self._head, *times, *self._tensors]

    def _timestamps(self) -> list[tuple[str, float]]:
        """Names and times of time.monotonic() in their order."""
        grpc = self._record.protocol == "grpc"
        received, sent = ("GRPC_WAITREAD", "GRPC_SEND") if grpc else ("HTTP_RECV", "HTTP_SEND")
        first = [(f"{received}_START", self._record.started), (f"{received}_END", self._begun), ("REQUEST_START", self._begun)]
        compute, end = self._compute()
        rest = [("INFER_RESPONSE_COMPLETE", end), ("REQUEST_END", end), (f"{sent}_START", end), (f"{sent}_END", max(end, self.ended))]
        return [*first, *compute, *rest]

    def _compute(self) -> tuple[list[tuple[str, float]], float]:
        """The times of the queue and of the computation, and the end of the request. A model without a generation only computes."""
        generations = [generation for generation in self._record.generations if generation.timings is not None]
        if not generations:
            return [("QUEUE_START", self._begun), ("COMPUTE_START", self._begun), ("COMPUTE_END", self.ended)], self.ended
        generation, end = generations[0], max(each.ended for each in generations)
        timings = generation.timings
        assert timings is not None
        queued = generation.started + timings.prepare_s
        admitted = queued + timings.queue_s
        launched = max(admitted, generation.chunks[0].started) if generation.chunks else admitted
        first = max(launched, generation.started + timings.time_to_first_token_s)
        return [
            ("QUEUE_START", queued),
            ("COMPUTE_START", admitted),
            ("COMPUTE_INPUT_END", launched),
            ("COMPUTE_OUTPUT_START", first),
            ("COMPUTE_END", max(first, end)),
        ], max(first, end)

    def _add(self, activity: str, tensors: Tensors) -> None:
        """Note tensors of the request or of a response."""
        for name, array in tensors.items():
            data = ",".join(map(_text, array.reshape(-1)[:MAX_DATA_CHARS]))[:MAX_DATA_CHARS]
            shape = ",".join(map(str, array.shape))
            tensor = {"name": name, "data": data, "shape": shape, "dtype": dtype_name(array)}
            self._tensors.append({"id": self._id, "activity": activity, "tensor": tensor})


def _text(value: Any) -> str:
    """An element of a tensor as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value.item() if isinstance(value, np.generic) else value)
