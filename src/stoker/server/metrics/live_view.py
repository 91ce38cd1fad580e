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
from stoker.base.metrics import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN
from stoker.frontend.service import Service
from stoker.runtime.live_state import LiveState, LiveStep
from stoker.server.protocol import Context

MIN_AGE_S = 0.5  # a state of this age is requested again
MAX_STEPS = 512  # retained for pages that are opened later
MAX_NAMES = 4096
PARTS = ("counters", "detail", "steps")
NO_STEPS: dict[str, Any] = {"steps": [], "row_sets": [], "names": {}}

LATENCIES = {"ttft": TIME_TO_FIRST_TOKEN, "inter_token": INTER_TOKEN_LATENCY}


class LiveView:
    """The newest state of the first model's executor. Pages of the same age share one request to the executor."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._latency: dict[str, list[int]] = {}
        self._service: Service | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget the executor."""
        self._state: LiveState | None = None  # the newest one, with the newest details
        self._fetched_s = dict.fromkeys(PARTS, -math.inf)  # monotonic, by part of the state
        self._steps: deque[tuple[LiveStep, list[int]]] = deque(maxlen=MAX_STEPS)  # with the sequence ids of its rows
        self._next_step = 0
        self._names: dict[int, str] = {}

    async def answer(self, detail: bool, first_step: int | None) -> dict[str, Any]:
        """The JSON of the live view: with `detail`, sequences and blocks; the steps from `first_step` on, unless it is None."""
        state, reason = None, None
        try:
            state = await self._current(detail, first_step is not None)
        except UnavailableError as error:
            reason = str(error)
        answer: dict[str, Any] = {
            "time_s": time.time(),
            "model": self._model,
            "models": [
                {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason}
                for each in self._context.repository.models()
            ],
            "unavailable": reason,
            "state": None,
            "latency": {key: {"bounds_s": metric.buckets, "counts": self._latency.get(key, [])} for key, metric in LATENCIES.items()},
            **(self._steps_from(first_step) if first_step is not None and state is not None else NO_STEPS),
        }
        if state is not None:
            answer["state"] = {"stats": state.stats, "time_s": state.time_s, "started_s": state.started_s, "next_step": state.next_step}
            if detail:
                answer["state"] |= {"running": state.running, "waiting": state.waiting, "tiers": state.tiers}
        return answer

    def _steps_from(self, first_step: int) -> dict[str, Any]:
        """The JSON of the steps from `first_step` on: steps, the sets of rows that they refer to, and the names of the sequences."""
        row_sets: list[list[int]] = []
        steps = []
        for step, seq_ids in self._steps:
            if step.number >= first_step:
                if not row_sets or row_sets[-1] is not seq_ids:
                    row_sets.append(seq_ids)
                steps.append(msgspec.structs.replace(step, rows=len(row_sets) - 1))
        seq_ids_of_all = {seq_id for seq_ids in row_sets for seq_id in seq_ids}
        names = {seq_id: self._names[seq_id] for seq_id in seq_ids_of_all if seq_id in self._names}
        return {"steps": steps, "row_sets": row_sets, "names": names}

    async def _current(self, detail: bool, with_steps: bool) -> LiveState:
        """A state whose requested parts are at most MIN_AGE_S old. Raises UnavailableError."""
        async with self._lock:
            service = self._context.default_service()
            if service is not self._service:
                self._service = service
                self._reset()
            parts = ["counters", *(["detail"] if detail else []), *(["steps"] if with_steps else [])]
            if self._state is None or time.monotonic() - min(self._fetched_s[part] for part in parts) >= MIN_AGE_S:
                state = await service.live(detail=detail, first_step=self._next_step if with_steps else None)
                if self._state is not None and state.started_s != self._state.started_s:  # another executor
                    self._reset()
                    state = await service.live(detail=detail, first_step=0 if with_steps else None)
                self._store(state, parts)
            assert self._state is not None
            return self._state

    def _store(self, state: LiveState, parts: list[str]) -> None:
        """Store the parts of a new state."""
        self._fetched_s |= dict.fromkeys(parts, time.monotonic())
        if "detail" not in parts and (old := self._state) is not None:
            state = msgspec.structs.replace(state, running=old.running, waiting=old.waiting, tiers=old.tiers)
        self._state = state
        self._latency = {key: self._context.metrics.histogram(metric, self._model) for key, metric in LATENCIES.items()}
        if "steps" in parts:
            self._next_step = state.next_step
            self._steps.extend((step, state.row_sets[step.rows]) for step in state.steps)
            self._names |= state.names
            for seq_id in list(islice(self._names, max(0, len(self._names) - MAX_NAMES))):
                del self._names[seq_id]

    @property
    def _model(self) -> str:
        """The name of the first model."""
        return self._context.repository.first()
