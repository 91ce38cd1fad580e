"""The state that HTTP and gRPC share (models, requests in flight, counters, settings), and the code that runs an inference."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from stoker.server.coordination import Coordinator, Values
from stoker.server.metrics.triton import Timer
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.config_override import CONFIG, read_batch_size
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.in_flight import CANCEL, InFlight
from stoker.server.protocols.kserve.inference import Inference, Parameters, Response, Responses, ServedModel
from stoker.server.protocols.kserve.log_settings import LogSettings
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.model_control import DRAIN, LOAD, SETTINGS, STATUS, UNLOAD, FixedEngine, ModelControl
from stoker.server.protocols.kserve.models.catalogue import Catalogue, build_catalogue
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
from stoker.server.protocols.kserve.tracing.settings import TraceSettings
from stoker.server.protocols.kserve.tracing.tracer import Tracer
from stoker.server.settings import ServerSettings

ENSEMBLE_PARAMETERS: Parameters = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number of responses"
)


class Core:
    """The state of KServe in one process."""

    def __init__(self, context: Context, catalogue: Catalogue | None = None) -> None:
        self.context = context
        self.settings: ServerSettings = context.coordination.values.get(SETTINGS, context.settings)
        self.in_flight = InFlight(context.coordination)
        self.catalogue = catalogue or build_catalogue(context, self.in_flight, self.settings)
        if isinstance(context.coordination, Coordinator) and LOAD not in context.coordination.actions:  # there is no supervisor
            ModelControl(context.coordination, context.settings, FixedEngine(context.settings))
        context.coordination.on_change(self._apply)
        self._apply_statuses(context.coordination.values)
        self.shared_memory = SharedMemory(context)
        context.cleanup.callback(self.shared_memory.close)
        self.counts = context.metrics.triton
        self.logging = LogSettings(context.coordination)
        self.trace_settings = TraceSettings(context.coordination, self.options.trace)
        self._tracer = Tracer(self.trace_settings)
        context.cleanup.callback(self._tracer.close)

    @classmethod
    def of(cls, context: Context, core: Core | None = None) -> Core:
        """The core of `context`. If it has none yet, `core` or a new one is stored as its core."""
        if "kserve" not in context.shared:
            context.shared["kserve"] = core or cls(context)
        shared: Core = context.shared["kserve"]
        return shared

    @property
    def options(self) -> TritonOptions:
        """The options of the models, from the last reading of the repository."""
        return self.settings.options if isinstance(self.settings.options, TritonOptions) else TritonOptions()

    @property
    def ready(self) -> bool:
        """Whether all loaded models are ready. Without strict_readiness, the server is always ready."""
        return not self.options.strict_readiness or all(not served.loaded or served.ready() for served in self.catalogue.all())

    async def responses(self, served: ServedModel, inference: Inference) -> Responses:
        """Run an inference and count it. Responses of an ensemble have the sequence parameters that Triton adds."""
        trace = self._tracer.begin(served, inference)
        with served.requests, self._timer(served, inference) as timer:
            async with aclosing(served.run(inference)) as stream:
                async for batch in stream:
                    timer.responded()
                    if trace is not None:
                        trace.add(batch)
                    yield _with_sequence_parameters(served, batch)

    async def single_response(self, served: ServedModel, inference: Inference) -> Response:
        """The response of a request that must have exactly one. Raises NotOneResponseError if the model returns none or several.

        The end of a decoupled request, which has no outputs, is not a response.
        """
        if served.complete is not None:
            trace = self._tracer.begin(served, inference)
            with served.requests, self._timer(served, inference) as timer:
                responses = _with_sequence_parameters(served, await served.complete(inference))
                timer.responded()
                if trace is not None:
                    trace.add(responses)
        else:
            responses = []
            async with aclosing(self.responses(served, inference)) as stream:
                async for batch in stream:
                    responses += [response for response in batch if response.has_outputs or served.unary or not served.model.decoupled]
                    if len(responses) > 1:
                        break
        if len(responses) != 1:
            raise NotOneResponseError
        return responses[0]

    def _timer(self, served: ServedModel, inference: Inference) -> Timer:
        """Counts an inference for the model and for the steps of an ensemble."""
        return Timer([self.counts.of(name) for name in (served.model.name, *served.members)], _rows(inference))

    def traced_model(self, name: str) -> str:
        """The name of a model whose trace settings are requested, or an empty one. Raises TritonError for an unknown model."""
        if name and name not in self.catalogue:
            raise TritonError(f"Request for unknown model : {name[:200]}")
        return name

    def statistics(self, served: ServedModel) -> dict[str, Any]:
        """The counters of a model, in the format of Triton's statistics."""
        return {"name": served.model.name, "version": served.version, **self.counts.of(served.model.name).statistics()}

    def index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """The models and their states, in the format of Triton's repository index."""
        rows = [{"name": s.model.name, "version": s.version, "state": s.state} for s in self.catalogue.all()]
        for row in rows:
            if row["state"] != "READY":
                row["reason"] = self.catalogue.find(row["name"]).status.reason or self._engine_reason()
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    def _engine_reason(self) -> str:
        """Why the engine is not ready."""
        repository = self.context.repository
        return repository.find(repository.first()).reason or "loading"

    async def set_loaded(self, name: str, parameters: Parameters, *, loaded: bool) -> None:
        """Load or unload a model. Raises TritonError, also for parameters that would replace files of the model."""
        if self.options.model_control != "explicit":
            raise TritonError("explicit model load / unload is not allowed if polling is enabled", 503)
        known = CONFIG if loaded else "unload_dependents"
        if unknown := next((key for key in parameters if key not in (known, "unload_dependents")), None):
            action = "load" if loaded else "unload"
            problem = f"parameter '{unknown[:80]}' is not supported: models are loaded from the repository as it is"
            raise TritonError(f"failed to {action} '{name[:200]}', {problem}.")
        if loaded:
            overridden = CONFIG in parameters and name in self.catalogue
            batch_size = read_batch_size(self.catalogue.find(name).model, parameters[CONFIG]) if overridden else None
            error = await self.context.coordination.call(LOAD, name, batch_size)
        else:
            error = await self.context.coordination.call(UNLOAD, name, parameters.get("unload_dependents") is True)
        if error:
            raise TritonError(error)

    async def _apply(self, changes: Values) -> None:
        """Apply a change of model control to the models of this process. A drain ends after drain_timeout_s at the latest."""
        if SETTINGS in changes:
            self._apply_settings(changes[SETTINGS])
        self._apply_statuses(changes)
        if (cancelled := changes.get(CANCEL)) is not None:
            self.in_flight.cancel_here(cancelled)
        if (names := changes.get(DRAIN)) is not None:
            drains = [served.requests.drained() for served in self.catalogue.all() if served.model.name in names]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*drains), self.settings.drain_timeout_s)

    def _apply_settings(self, settings: ServerSettings) -> None:
        """Replace the models. Requests in flight continue with those that they began with."""
        previous, self.settings = self.catalogue, settings
        self.catalogue = build_catalogue(self.context, self.in_flight, settings)
        for served in self.catalogue.all():
            if served.model.name in previous:
                served.requests = previous.find(served.model.name).requests
        self._apply_statuses(self.context.coordination.values)

    def _apply_statuses(self, values: Mapping[str, Any]) -> None:
        """Set the status of each model for which `values`, the values of the coordination, has one."""
        for served in self.catalogue.all():
            if (status := values.get(STATUS + served.model.name)) is not None:
                served.status = status


class NotOneResponseError(TritonError):
    """A model did not return exactly one response, as the caller requires."""

    def __init__(self) -> None:
        super().__init__(NOT_ONE_RESPONSE, 200)  # Triton's HTTP server has sent this status already


def _with_sequence_parameters(served: ServedModel, batch: list[Response]) -> list[Response]:
    """The responses with the parameters that Triton adds to those of an ensemble. Changes them in place."""
    if served.model.platform == "ensemble":
        for response in batch:
            response.parameters = ENSEMBLE_PARAMETERS | response.parameters if response.parameters else ENSEMBLE_PARAMETERS
    return batch


def _rows(inference: Inference) -> int:
    """The size of the batch axis. 1 for a model without one."""
    return len(next(iter(inference.inputs.values()))) if inference.model.max_batch_size and inference.inputs else 1
