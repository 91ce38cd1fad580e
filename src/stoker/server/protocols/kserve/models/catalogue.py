"""The models that KServe clients see: those of a Triton repository, or default ones for an engine without a repository."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stoker.base.errors import StokerError
from stoker.frontend.service import Service
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.errors import TritonError, UnknownModelError
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import ServedModel
from stoker.server.protocols.kserve.model_config import (
    KINDS,
    UNLOADED,
    ModelStatus,
    TritonModel,
    TritonOptions,
    tensors_of_all_releases,
)
from stoker.server.protocols.kserve.models.ensemble import BLS, Ensemble
from stoker.server.protocols.kserve.models.generating import GeneratingModel
from stoker.server.protocols.kserve.models.tensorrt_llm import TensorrtLLM
from stoker.server.protocols.kserve.models.tokenizer import Postprocessing, Preprocessing, TokenizerModel
from stoker.server.protocols.kserve.test_models import test_models
from stoker.server.settings import ServerSettings

DEFAULT_BATCH_SIZE = 256  # maximum rows of one request for default models
MAX_BEAM_WIDTH = 64  # for default models; the limit of the engine applies, too
_ENSEMBLE_MEMBERS = ("preprocessing", "tensorrt_llm", "postprocessing")


class Catalogue:
    """Models by name, in alphabetical order as in Triton."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = {served.model.name: served for served in sorted(models, key=lambda served: served.model.name)}

    def all(self) -> list[ServedModel]:
        """All models, loaded or not."""
        return list(self._models.values())

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """A model, whether it is ready or not. Raises UnknownModelError."""
        served = self._models.get(name)
        if served is None:
            raise UnknownModelError(name)
        if version and version != served.version:
            raise UnknownModelError(name, version)
        return served

    def ready(self, name: str, version: str | None = None) -> ServedModel:
        """A loaded model. Raises UnknownModelError, or TritonError with status 503 if the model was unloaded."""
        served = self.find(name, version)
        if not served.loaded:
            raise TritonError(f"Request for unknown model: '{name}' has no available versions", 503)
        return served


def build_catalogue(context: Context, in_flight: InFlight, settings: ServerSettings) -> Catalogue:
    """The catalogue of the models in the settings; without any, of five default models and an ensemble per served model name."""
    configured = settings.options if isinstance(settings.options, TritonOptions) else None
    options = configured or TritonOptions(models=default_models(), unary=True, max_beam_width=MAX_BEAM_WIDTH)
    models = [_served(model, context, options, in_flight, settings) for model in options.models]
    if settings.test_models:
        models += test_models(context.coordination)
    for served in models:
        size = options.batch_sizes.get(served.model.name, served.model.max_batch_size)
        served.model = msgspec.structs.replace(served.model, max_batch_size=size)
        served.status = ModelStatus() if options.is_loaded_at_start(served.model.name) else UNLOADED
    if options.unary:
        used_names = {served.model.name for served in models}
        names = [model.name for model in context.repository.models() if model.name not in used_names]
        models += [_served(_default_model("ensemble", name), context, options, in_flight, settings) for name in names]
    return Catalogue(models)


def default_models() -> tuple[TritonModel, ...]:
    """One model of each kind, named after the kind, with the tensors of all releases."""
    return tuple(_default_model(kind, kind) for kind in KINDS)


def _default_model(kind: str, name: str) -> TritonModel:
    """A model with the tensors that any release declares."""
    inputs, outputs = tensors_of_all_releases(kind)
    ensemble = kind == "ensemble"
    return TritonModel(
        name=name,
        kind=kind,
        platform="ensemble" if ensemble else "",
        backend="" if ensemble else "python",
        inputs=inputs,
        outputs=outputs,
        max_batch_size=DEFAULT_BATCH_SIZE,
        decoupled=kind not in ("preprocessing", "postprocessing"),
    )


def _served(model: TritonModel, context: Context, options: TritonOptions, in_flight: InFlight, settings: ServerSettings) -> ServedModel:
    """A model as clients see it. It uses the generation service with its name, if there is one, or else the default one."""

    def service() -> Service:
        """The service of this model's name, or else the default one."""
        return context.repository.service(model.name) if model.name in context.repository else context.default_service()

    members: tuple[str, ...] = ()
    if model.kind in ("ensemble", "tensorrt_llm_bls"):
        members = tuple(member.name for kind in _ENSEMBLE_MEMBERS if (member := options.of_kind(kind)))
    runner = _runner(model, service, settings, options, in_flight)
    return ServedModel(
        model=model,
        run=runner.run,
        ready=lambda: _is_ready(service),
        members=members,
        unary=options.unary,
        complete=runner.complete if isinstance(runner, GeneratingModel) else None,
    )


def _runner(
    model: TritonModel, service: Callable[[], Service], settings: ServerSettings, options: TritonOptions, in_flight: InFlight
) -> GeneratingModel | TokenizerModel:
    """The object that runs a model of this kind. `service` returns the service when a request needs it."""
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


def _is_ready(service: Callable[[], Service]) -> bool:
    """Whether the model accepts requests. `service` returns its service, and raises StokerError while it is not loaded."""
    try:
        return service().ready
    except StokerError:
        return False
