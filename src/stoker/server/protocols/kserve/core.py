"""What both wires share: the catalogue, requests in flight, counts, settings; and one way to run an inference."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.server.metrics.triton import Timer
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import Inference, Parameters, Response, Responses, ServedModel
from stoker.server.protocols.kserve.models.catalogue import Catalogue, over
from stoker.server.protocols.kserve.trace_and_log import LogSettings

ENSEMBLE_PARAMETERS: Parameters = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for model that generates various number of responses"


class Core:
    """Of one process."""

    def __init__(self, context: Context, catalogue: Catalogue | None = None) -> None:
        self.context = context
        self.in_flight = InFlight()
        self.catalogue = catalogue or over(context, self.in_flight)
        self.counts = context.metrics.triton
        self.logging = LogSettings()

    @classmethod
    def of(cls, context: Context, core: Core | None = None) -> Core:
        """The one core of a context; `core` becomes it when there is none yet."""
        if "kserve" not in context.shared:
            context.shared["kserve"] = core or cls(context)
        return context.shared["kserve"]

    async def responses(self, served: ServedModel, inference: Inference) -> Responses:
        """The model's responses, counted; an ensemble's carry the sequence parameters that Triton's do."""
        with self._timer(served, inference) as timer:
            async with aclosing(served.run(inference)) as stream:
                async for batch in stream:
                    timer.responded()
                    yield _with_shared(served, batch)

    async def one(self, served: ServedModel, inference: Inference) -> Response:
        """The one response of a request. Raises TritonError where a model gives none or more."""
        if served.answer is not None:
            with self._timer(served, inference) as timer:
                found = _with_shared(served, await served.answer(inference))
                timer.responded()
        else:
            found = []
            async with aclosing(self.responses(served, inference)) as stream:
                async for batch in stream:
                    found += batch
                    if len(found) > 1:
                        break
        if len(found) != 1:
            raise NotOneResponseError
        return found[0]

    def _timer(self, served: ServedModel, inference: Inference) -> Timer:
        return Timer([self.counts.of(name) for name in (served.model.name, *served.members)], _rows(inference))

    def statistics(self, served: ServedModel) -> dict[str, Any]:
        return {"name": served.model.name, "version": served.version, **self.counts.of(served.model.name).statistics()}

    def index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """The repository's models and their states, as Triton lists them."""
        rows = [{"name": s.model.name, "version": s.version, "state": s.state} for s in self.catalogue.all()]
        for row in rows:
            if row["state"] != "READY":
                row["reason"] = "unloaded" if self.catalogue.find(row["name"]).unloaded else "loading"
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    def set_loaded(self, name: str, given: Parameters, *, loaded: bool) -> None:
        """Load or unload a model. Raises TritonError, also for the parameters of Triton's that would replace its files."""
        if unknown := next((key for key in given if key != "unload_dependents"), None):
            raise TritonError(f"parameter '{unknown[:80]}' is not supported: models are loaded from the repository as it is.")
        self.catalogue.set_loaded(name, loaded=loaded)
        members = self.catalogue.find(name).members if given.get("unload_dependents") is True and not loaded else ()
        for member in members:
            self.catalogue.set_loaded(member, loaded=False)


class NotOneResponseError(TritonError):
    """A model gave another number of responses than the caller can take."""

    def __init__(self) -> None:
        super().__init__(NOT_ONE, 200)  # the status that Triton's HTTP has begun to send by then


def _with_shared(served: ServedModel, batch: list[Response]) -> list[Response]:
    if served.model.platform == "ensemble":
        for response in batch:
            response.parameters = ENSEMBLE_PARAMETERS | response.parameters if response.parameters else ENSEMBLE_PARAMETERS
    return batch


def _rows(inference: Inference) -> int:
    return len(next(iter(inference.inputs.values()))) if inference.model.max_batch_size and inference.inputs else 1
