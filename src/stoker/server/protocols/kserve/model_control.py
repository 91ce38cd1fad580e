"""Explicit model control: clients load, unload and reload the models of a repository. It runs once per server, for all frontends.

The models of a repository share one engine, so each load reads the whole repository again and applies it to all models. All of them need
the executor: a load of any of them starts it if it is not running, and a load of tensorrt_llm, or of an ensemble that contains it, also
replaces it if its engine or its settings have changed. The executor ends when tensorrt_llm or the last model is unloaded.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from stoker.base.errors import StokerError
from stoker.base.logging import get_logger
from stoker.server.coordination import Coordinator
from stoker.server.protocols.kserve.model_config import UNLOADED, ModelStatus, TritonOptions
from stoker.server.protocols.kserve.test_models import NAMES
from stoker.server.settings import ServerSettings

log = get_logger(__name__)

LOAD, UNLOAD = "load", "unload"  # actions of the coordination
SETTINGS, STATUS, DRAIN = "kserve/settings", "kserve/model/", "kserve/drain"  # values of the coordination
ANSWER_AFTER_S = 0.5  # an unload whose requests take longer is answered while they finish


class EngineHost(Protocol):
    """The process that runs the executor."""

    async def read_settings(self) -> ServerSettings:
        """Read the repository again. Raises StokerError if it cannot be served."""

    @property
    def running(self) -> bool:
        """Whether there is an executor."""

    @property
    def must_start(self) -> bool:
        """Whether `start` would start an executor, because there is none or it has another engine or other settings."""

    async def start(self) -> None:
        """Start the executor of the settings that were read last, and connect the frontends, unless it is running already.

        A running executor of other settings ends first, after its requests. Raises StokerError if the executor cannot be started.
        """

    async def stop(self) -> None:
        """End the executor after its requests. Does nothing if it is not running."""


class FixedEngine:
    """An engine in the same process that is always loaded."""

    running = True
    must_start = False

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings

    async def read_settings(self) -> ServerSettings:
        """The settings that the server started with."""
        return self._settings

    async def start(self) -> None:
        """Does nothing, because the engine is loaded."""

    async def stop(self) -> None:
        """Does nothing: the engine stays loaded."""


class ModelControl:
    """The actions LOAD and UNLOAD of `coordinator`. Their result is an error message, which is empty if there is none."""

    def __init__(self, coordinator: Coordinator, settings: ServerSettings, host: EngineHost) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._host = host
        self._batch_sizes: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._finishing: set[asyncio.Task[None]] = set()
        coordinator.actions |= {LOAD: self.load, UNLOAD: self.unload}

    async def load(self, name: str, batch_size: int | None) -> str:
        """Load a model and the models of its steps. `batch_size` replaces max_batch_size until the next load."""
        async with self._lock:
            try:
                self._settings = await self._host.read_settings()
            except StokerError as error:
                return f"failed to load '{name[:200]}', {error}"
            if name not in self._known_names():
                return f"failed to load '{name[:200]}', failed to poll from model repository"
            names = self._options.with_steps(name)
            starts = self._host.must_start if self._has_engine(names) else self._needs_engine(names) and not self._host.running
            loading = [member for member in names if starts or not self._is_loaded(member)]
            await self._publish(loading, ModelStatus("LOADING", "loading"))
            try:
                if starts:
                    await self._host.start()
            except StokerError as error:
                await self._publish(loading, ModelStatus("UNAVAILABLE", str(error)))
                return f"failed to load '{name[:200]}', {error}"
            self._batch_sizes.pop(name, None)
            if batch_size is not None:
                self._batch_sizes[name] = batch_size
            options = msgspec.structs.replace(self._options, batch_sizes=dict(self._batch_sizes))
            await self._coordinator.publish({SETTINGS: msgspec.structs.replace(self._settings, options=options)})
            await self._publish(names, ModelStatus())
            return ""

    async def unload(self, name: str, members: bool) -> str:
        """Unload a model, with `members` also the models of its steps, and the ensembles that cannot run without it.

        New requests are refused when this returns. Requests in flight finish, and then the executor ends if it is no longer needed.
        """
        await self._lock.acquire()
        if name not in self._known_names():
            self._lock.release()
            return f"failed to unload '{name[:200]}', failed to poll from model repository"
        names = self._options.with_steps(name) if members else [name]
        ensembles = [model.name for model in self._options.models if any(step.model_name in names for step in model.steps)]
        unloading = [each for each in dict.fromkeys([*names, *ensembles]) if self._is_loaded(each)]
        await self._publish(unloading, ModelStatus("UNLOADING", "finishing its requests"))
        task = asyncio.create_task(self._finish(unloading))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        await asyncio.wait({task}, timeout=ANSWER_AFTER_S)
        return ""

    async def engine_failed(self, reason: str) -> None:
        """Publish that the model of the engine could not be loaded at the start."""
        await self._publish(
            [model.name for model in self._options.models if model.kind == "tensorrt_llm"], ModelStatus("UNAVAILABLE", reason)
        )

    async def _finish(self, names: list[str]) -> None:
        """Wait for the requests of unloaded models, stop the executor if it is no longer needed, and publish their status.

        Holds the lock.
        """
        try:
            await self._coordinator.signal(DRAIN, tuple(names))
            loaded = [model.name for model in self._options.models if self._is_loaded(model.name)]
            if self._has_engine(names) or (self._needs_engine(names) and not loaded):
                await self._host.stop()
            await self._publish(names, UNLOADED)
        except Exception:
            log.exception("unloading %s failed", ", ".join(names))
        finally:
            self._lock.release()

    async def _publish(self, names: list[str], status: ModelStatus) -> None:
        """Set the status of these models in all frontends."""
        if names:
            await self._coordinator.publish({STATUS + name: status for name in names})

    @property
    def _options(self) -> TritonOptions:
        """The KServe options of the settings. The defaults if the server has no Triton repository."""
        options = self._settings.options
        return options if isinstance(options, TritonOptions) else TritonOptions()

    def _known_names(self) -> set[str]:
        """The names that clients can load."""
        tests = NAMES if self._settings.test_models else ()
        return {*(model.name for model in self._options.models), *tests}

    def _is_loaded(self, name: str) -> bool:
        """Whether the model is loaded, by its last status or, before the first one, by the options."""
        status = self._coordinator.values.get(STATUS + name)
        return self._options.is_loaded_at_start(name) if status is None else status.state == "READY"

    def _needs_engine(self, names: list[str]) -> bool:
        """Whether one of the models is not a test model."""
        return any(model.name in names for model in self._options.models)

    def _has_engine(self, names: list[str]) -> bool:
        """Whether tensorrt_llm is among the models."""
        return any(model.kind == "tensorrt_llm" and model.name in names for model in self._options.models)
