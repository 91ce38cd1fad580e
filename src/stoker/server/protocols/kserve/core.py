"""The state that HTTP and gRPC share (models, requests in flight, counters, settings), and the code that runs an inference."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.server.metrics.triton import Timer
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import Inference, Parameters, Response, Responses, ServedModel
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import Catalogue, build_catalogue
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
from stoker.server.protocols.kserve.trace_and_log import LogSettings

ENSEMBLE_PARAMETERS: Parameters = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number of responses"
)


class Core:
    """The state of KServe in one process."""

    def __init__(self, context: Context, catalogue: Catalogue | None = None) -> None:
        self.context = context
        configured = context.settings.options
        self.options = configured if isinstance(configured, TritonOptions) else TritonOptions()
        self.in_flight = InFlight()
        self.catalogue = catalogue or build_catalogue(context, self.in_flight)
        self.shared_memory = SharedMemory(context)
        context.cleanup.callback(self.shared_memory.close)
        self.counts = context.metrics.triton
        self.logging = LogSettings()

    @classmethod
    def of(cls, context: Context, core: Core | None = None) -> Core:
        """The core of a context. If it has none yet, `core` or a new one becomes its core."""
        if "kserve" not in context.shared:
            context.shared["kserve"] = core or cls(context)
        shared: Core = context.shared["kserve"]
        return shared

    @property
    def ready(self) -> bool:
        """Whether all loaded models are ready. Without strict_readiness, the server is always ready."""
        return not self.options.strict_readiness or all(served.unloaded or served.ready() for served in self.catalogue.all())

    async def responses(self, served: ServedModel, inference: Inference) -> Responses:
        """Run an inference and count it. Responses of an ensemble have the sequence parameters that Triton adds."""
        with self._timer(served, inference) as timer:
            async with aclosing(served.run(inference)) as stream:
                async for batch in stream:
                    timer.responded()
                    yield _with_sequence_parameters(served, batch)

    async def single_response(self, served: ServedModel, inference: Inference) -> Response:
        """The response of a request that must have exactly one. Raises NotOneResponseError if the model returns none or several.

        The end of a decoupled request, which has no outputs, is not a response.
        """
        if served.complete is not None:
            with self._timer(served, inference) as timer:
                responses = _with_sequence_parameters(served, await served.complete(inference))
                timer.responded()
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
        return Timer([self.counts.of(name) for name in (served.model.name, *served.members)], _rows(inference))

    def statistics(self, served: ServedModel) -> dict[str, Any]:
        return {"name": served.model.name, "version": served.version, **self.counts.of(served.model.name).statistics()}

    def index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """The models and their states, in the format of Triton's repository index."""
        rows = [{"name": s.model.name, "version": s.version, "state": s.state} for s in self.catalogue.all()]
        for row in rows:
            if row["state"] != "READY":
                row["reason"] = "unloaded" if self.catalogue.find(row["name"]).unloaded else "loading"
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    def set_loaded(self, name: str, parameters: Parameters, *, loaded: bool) -> None:
        """Load or unload a model. Raises TritonError, also for Triton's parameters that would replace the files of the model."""
        if unknown := next((key for key in parameters if key != "unload_dependents"), None):
            raise TritonError(f"parameter '{unknown[:80]}' is not supported: models are loaded from the repository as it is.")
        self.catalogue.set_loaded(name, loaded=loaded)
        members = self.catalogue.find(name).members if parameters.get("unload_dependents") is True and not loaded else ()
        for member in members:
            self.catalogue.set_loaded(member, loaded=False)


class NotOneResponseError(TritonError):
    """A model did not return exactly one response, as the caller requires."""

    def __init__(self) -> None:
        super().__init__(NOT_ONE_RESPONSE, 200)  # Triton's HTTP server has sent this status already


def _with_sequence_parameters(served: ServedModel, batch: list[Response]) -> list[Response]:
    if served.model.platform == "ensemble":
        for response in batch:
            response.parameters = ENSEMBLE_PARAMETERS | response.parameters if response.parameters else ENSEMBLE_PARAMETERS
    return batch


def _rows(inference: Inference) -> int:
    return len(next(iter(inference.inputs.values()))) if inference.model.max_batch_size and inference.inputs else 1
