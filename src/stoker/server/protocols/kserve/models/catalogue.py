"""The models that KServe clients see: the five of a repository, or those that a plain engine shows, over one service."""

from __future__ import annotations

from collections.abc import Callable

from stoker.base.errors import StokerError
from stoker.frontend.service import Service
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.errors import TritonError, UnknownModelError
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import ServedModel
from stoker.server.protocols.kserve.model_config import KINDS, TritonModel, TritonOptions, tensors
from stoker.server.protocols.kserve.models.ensemble import BLS, Ensemble
from stoker.server.protocols.kserve.models.generating import Generating
from stoker.server.protocols.kserve.models.tensorrt_llm import TensorrtLLM
from stoker.server.protocols.kserve.models.tokenizer import Postprocessing, Preprocessing, TokenizerModel

PLAIN_BATCH_SIZE = 256  # rows of one request, of models that no file describes
MAX_BEAM_WIDTH = 64  # where only the engine's own limit counts
_MEMBERS = ("preprocessing", "tensorrt_llm", "postprocessing")


class Catalogue:
    """Models by name, in order of the alphabet as Triton lists them."""

    def __init__(self, models: list[ServedModel], mode: str = "none") -> None:
        self._models = {served.model.name: served for served in sorted(models, key=lambda served: served.model.name)}
        self._mode = mode

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """A model, ready or not. Raises UnknownModelError."""
        served = self._models.get(name)
        if served is None:
            raise UnknownModelError(name)
        if version and version != served.version:
            raise UnknownModelError(name, version)
        return served

    def ready(self, name: str, version: str | None = None) -> ServedModel:
        """A model that takes requests. Raises UnknownModelError, or TritonError 503 for one that was unloaded."""
        served = self.find(name, version)
        if served.unloaded:
            raise TritonError(f"Request for unknown model: '{name}' has no available versions", 503)
        return served

    def set_loaded(self, name: str, *, loaded: bool) -> None:
        """Let a model take requests, or not; those in flight end in peace. Raises TritonError unless the server's mode is explicit."""
        if self._mode != "explicit":
            raise TritonError("explicit model load / unload is not allowed if polling is enabled", 503)
        served = self._models.get(name)
        if served is None:
            word = "load" if loaded else "unload"
            raise TritonError(f"failed to {word} '{name[:200]}', failed to poll from model repository")
        served.unloaded = not loaded


def over(context: Context, in_flight: InFlight) -> Catalogue:
    """The catalogue of a server: what its settings describe, or the five models and the served name as one more ensemble."""
    options = context.settings.options if isinstance(context.settings.options, TritonOptions) else None
    chosen = options or TritonOptions(models=plain_models(), unary=True, max_beam_width=MAX_BEAM_WIDTH)
    models = [_served(model, context, chosen, in_flight) for model in chosen.models]
    if chosen.unary:
        taken = {served.model.name for served in models}
        names = [model.name for model in context.repository.models() if model.name not in taken]
        models += [_served(_plain("ensemble", name), context, chosen, in_flight) for name in names]
    return Catalogue(models, chosen.model_control)


def plain_models() -> tuple[TritonModel, ...]:
    return tuple(_plain(kind, kind) for kind in KINDS)


def _plain(kind: str, name: str) -> TritonModel:
    inputs, outputs = tensors(kind)
    ensemble = kind == "ensemble"
    return TritonModel(
        name=name, kind=kind, platform="ensemble" if ensemble else "", backend="" if ensemble else "python", inputs=inputs, outputs=outputs,
        max_batch_size=PLAIN_BATCH_SIZE, decoupled=kind not in ("preprocessing", "postprocessing"),
    )  # fmt: skip


def _served(model: TritonModel, context: Context, options: TritonOptions, in_flight: InFlight) -> ServedModel:
    def service() -> Service:
        return context.repository.service(model.name) if model.name in context.repository else context.default_service()

    members = tuple(m.name for kind in _MEMBERS if (m := options.of_kind(kind))) if model.kind in ("ensemble", "tensorrt_llm_bls") else ()
    runner = _runner(model, service, context, options, in_flight)
    return ServedModel(
        model=model, run=runner.run, ready=lambda: _answers(service), members=members, unary=options.unary,
        answer=runner.answer if isinstance(runner, Generating) else None,
    )  # fmt: skip


def _runner(
    model: TritonModel, service: Callable[[], Service], context: Context, options: TritonOptions, in_flight: InFlight
) -> Generating | TokenizerModel:
    settings = context.settings
    match model.kind:
        case "preprocessing":
            return Preprocessing(service, settings)
        case "postprocessing":
            return Postprocessing(service, settings)
        case "tensorrt_llm":
            return TensorrtLLM(service, options, settings, in_flight)
        case "ensemble":
            return Ensemble(service, options, settings, in_flight)
    return BLS(service, options, settings, in_flight)


def _answers(service: Callable[[], Service]) -> bool:
    try:
        return service().ready
    except StokerError:
        return False
