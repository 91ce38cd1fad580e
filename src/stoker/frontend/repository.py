"""The models of a server by name and version, and their states."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable

import msgspec

from stoker.base.errors import NotFoundError, StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.base.registry import nearest
from stoker.frontend.service import Service

log = get_logger(__name__)

NOT_LOADED = "not loaded"  # the reason of a model that was never loaded

Load = Callable[[], Awaitable[Service]]
Unload = Callable[[Service], Awaitable[None]]


class ModelState(enum.StrEnum):
    """The state of a model. UNAVAILABLE: not loaded, unloaded or failed."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"


class Model(msgspec.Struct, kw_only=True):
    """One version of a model. `load` creates its service; `unload` waits for its requests and closes the service."""

    name: str
    version: str
    load: Load
    unload: Unload
    state: ModelState = ModelState.UNAVAILABLE
    reason: str = NOT_LOADED  # of the state; empty when ready
    service: Service | None = None

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and its executor responds."""
        return self.state is ModelState.READY and self.service is not None and self.service.ready

    @property
    def why_not_ready(self) -> str:
        """The reason for a model that is not ready."""
        return self.reason or "its executor does not answer"


class ModelRepository:
    """Loads, unloads and finds models. Use it from one event loop only."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Model]] = {}

    def register(self, name: str, load: Load, unload: Unload, version: str = "1") -> Model:
        """Add a model without loading it, and return it. Raises ValueError when the name and version exist."""
        versions = self._models.setdefault(name, {})
        if version in versions:
            raise ValueError(f"model {name!r} version {version} is registered twice")
        versions[version] = model = Model(name=name, version=version, load=load, unload=unload)
        return model

    def models(self) -> list[Model]:
        """All versions of all models, in the order in which their names were registered."""
        return [model for versions in self._models.values() for model in versions.values()]

    def first(self) -> str:
        """The name of the model that was registered first."""
        return next(iter(self._models))

    def __contains__(self, name: str) -> bool:
        return name in self._models

    @property
    def ready(self) -> bool:
        """Whether there is at least one model, and all models are ready."""
        return bool(self._models) and all(model.ready for model in self.models())

    def find(self, name: str, version: str | None = None) -> Model:
        """The model with this name in any state; without a version, the highest one.

        Raises NotFoundError, which lists similar names or the existing versions.
        """
        versions = self._models.get(name)
        if not versions:
            known = nearest(name, list(self._models)) or list(self._models)
            raise NotFoundError(f"there is no model {name[:80]!r}.", cure=f"Use one of: {', '.join(known)}." if known else "")
        if not version:
            return versions[max(versions, key=_version_order)] if len(versions) > 1 else next(iter(versions.values()))
        if version not in versions:
            raise NotFoundError(f"model {name!r} has no version {version[:80]!r}.", cure=f"Use one of: {', '.join(versions)}.")
        return versions[version]

    def service(self, name: str, version: str | None = None) -> Service:
        """The service of a ready model. Raises NotFoundError, or UnavailableError with the model's state and the reason."""
        model = self.find(name, version)
        if model.ready and model.service is not None:
            return model.service
        state = ModelState.UNAVAILABLE if model.state is ModelState.READY else model.state
        raise UnavailableError(f"model {name!r} is {state}: {model.why_not_ready}.")

    async def load(self, name: str, version: str | None = None) -> None:
        """Load a model, unless it is loaded or loading. If that raises an error, the model is UNAVAILABLE for this reason."""
        model = self.find(name, version)
        if model.state in (ModelState.LOADING, ModelState.READY):
            return
        if model.state is ModelState.DRAINING:
            raise UnavailableError(f"model {name!r} is draining.", cure="Load it again once it is unavailable.")
        model.state, model.reason = ModelState.LOADING, "being loaded"
        try:
            model.service = await model.load()
        except BaseException as error:
            model.state, model.reason = ModelState.UNAVAILABLE, f"{type(error).__name__}: {error}"
            if isinstance(error, Exception) and not isinstance(error, StokerError):
                log.exception("loading %s failed", name)
            raise
        model.state, model.reason = ModelState.READY, ""

    async def unload(self, name: str, version: str | None = None) -> None:
        """Reject new requests for a model, wait for the running ones, and drop its service. Does nothing unless the model is ready."""
        model = self.find(name, version)
        if model.state is not ModelState.READY or model.service is None:
            return
        model.state, model.reason = ModelState.DRAINING, "finishing its requests"
        try:
            await model.unload(model.service)
        finally:
            model.state, model.reason, model.service = ModelState.UNAVAILABLE, "unloaded", None


def _version_order(version: str) -> tuple[int, str]:
    """A sort key: numeric versions in numeric order, after all other versions."""
    return (int(version), "") if version.isdecimal() else (-1, version)
