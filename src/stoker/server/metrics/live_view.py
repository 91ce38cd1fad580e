"""The live view: the state of the executor and latencies, requested at most twice a second however many pages are open."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from itertools import islice
from typing import Any

import msgspec

from stoker.base.errors import UnavailableError
from stoker.base.metrics import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, Metric
from stoker.frontend.service import Service
from stoker.runtime.live_state import LiveState
from stoker.runtime.step_history import StepRecord
from stoker.server.protocol import Context

MIN_AGE_S = 0.5  # a state of this age is requested again
MAX_STEPS = 512  # retained for pages that are opened later
MAX_NAMES = 4096

LATENCIES = {"ttft": TIME_TO_FIRST_TOKEN, "inter_token": INTER_TOKEN_LATENCY}


class LiveView:
    """The newest state of the first model's executor. Pages of the same age share one request to the executor."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._state: LiveState | None = None
        self._latency: dict[str, list[int]] = {}
        self._fetched_s = self._steps_fetched_s = -math.inf  # monotonic
        self._service: Service | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._next_step = 0
        self._names: dict[int, str] = {}

    async def answer(self, first_step: int | None) -> dict[str, Any]:
        """The JSON of the live view. `first_step`: the first step to include; None: no steps."""
        name, reason = self._context.repository.first(), None
        state: LiveState | None = None
        try:
            state = await self._current(first_step is not None)
        except UnavailableError as error:
            reason = str(error)
        steps = [step for step in self._steps if step.number >= first_step] if first_step is not None and state else []
        seq_ids = {seq_id for step in steps for seq_id in step.seq_ids}
        return {
            "time_s": time.time(),
            "model": name,
            "models": [
                {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason}
                for each in self._context.repository.models()
            ],
            "unavailable": reason,
            "state": msgspec.structs.replace(state, steps=[], names={}, log=[]) if state is not None else None,
            "steps": steps,
            "names": {seq_id: self._names[seq_id] for seq_id in seq_ids if seq_id in self._names},
            "latency": {key: {"bounds_s": metric.buckets, "counts": self._latency.get(key, [])} for key, metric in LATENCIES.items()},
        }

    async def _current(self, with_steps: bool) -> LiveState:
        """A state that is at most MIN_AGE_S old, with the newest steps if `with_steps`. Raises UnavailableError."""
        async with self._lock:
            service = self._context.default_service()
            if service is not self._service:
                self._forget(service)
            fetched_s = self._steps_fetched_s if with_steps else self._fetched_s
            if self._state is None or time.monotonic() - fetched_s >= MIN_AGE_S:
                await self._fetch(service, with_steps)
            assert self._state is not None
            return self._state

    async def _fetch(self, service: Service, with_steps: bool) -> None:
        """Request the state, and with `with_steps` the steps since the last request for them."""
        state = await service.live(self._next_step if with_steps else None)
        if self._state is not None and state.started_s != self._state.started_s:  # another executor
            self._forget(service)
            state = await service.live(0 if with_steps else None)
        self._state, self._fetched_s = state, time.monotonic()
        self._latency = {key: self._histogram(metric) for key, metric in LATENCIES.items()}
        if not with_steps:
            return
        self._steps_fetched_s, self._next_step = self._fetched_s, state.next_step
        self._steps.extend(state.steps)
        self._names |= state.names
        for seq_id in list(islice(self._names, max(0, len(self._names) - MAX_NAMES))):
            del self._names[seq_id]

    def _histogram(self, metric: Metric) -> list[int]:
        """The observations of each bucket, for the first model."""
        return self._context.metrics.histogram(metric, self._context.repository.first())

    def _forget(self, service: Service) -> None:
        """Begin again with a new service, whose executor numbers its steps and sequences from 0."""
        self._service, self._state, self._next_step, self._steps_fetched_s = service, None, 0, -math.inf
        self._steps.clear()
        self._names.clear()
