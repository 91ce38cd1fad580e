"""The executor process as the supervisor controls it: its start, its replacement by another engine, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from stoker.base.config import RuntimeConfig
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings
from stoker.runtime.expected_devices import expected_devices
from stoker.server.coordination import Coordinator
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL, Child
from stoker.server.processes.executor_restarts import ExecutorRestarts
from stoker.server.processes.prestart import Prestarted
from stoker.server.processes.tasks import EXECUTOR, FAILURE, ExecutorPlace, ExecutorTask, ServedEngine
from stoker.server.settings import ServerSettings

log = get_logger(__name__)

MODULE = "stoker.server.processes.executor"
STOP_S = 10.0
# The engine that the files request now. Raises StokerError.
ReadAgain = Callable[[], ServedEngine]


def prestart_executor(engine: Path, runtime: RuntimeConfig, nodes: NodeSettings) -> Prestarted:
    """Start the processes of the ranks of an engine that is not checked yet."""
    return Prestarted("executor", MODULE, EXECUTOR_STOP_SIGNAL, expected_devices(engine, runtime, nodes))


class ExecutorControl:
    """One executor at a time, which is started again when it fails, if the settings say so (`restarts`).

    `attach` and `detach` are called when the supervisor is to watch a child, and when its end is expected. `report` is called when the
    executor has failed and is started again, with the reason, and when it is ready again, with None. With `ends_hung`, an executor that
    does not answer is ended, also if it is not started again. `prestarted` becomes the first executor.
    """

    def __init__(
        self,
        served: ServedEngine,
        run_dir: Path,
        coordinator: Coordinator,
        read_again: ReadAgain | None,
        attach: Callable[[Child], None],
        detach: Callable[[Child], None],
        report: Callable[[str | None], None],
        *,
        ends_hung: bool = False,
        prestarted: Prestarted | None = None,
    ) -> None:
        self.child: Child | None = None
        self._next = served  # the engine of the next start
        self._running: tuple[object, ...] = ()  # identifies the engine of `child`
        self._run_dir = run_dir
        self._coordinator = coordinator
        self._read_again = read_again
        self._attach, self._detach = attach, detach
        self._num_starts = 0
        self._prestarted = prestarted
        self.restarts = ExecutorRestarts(self, served.settings.restarts, attach, report, ends_hung=ends_hung)

    async def launch(self) -> Child:
        """Start the process of an executor and publish its place. Returns before it is ready."""
        served, self._running = self._next, _identity(self._next)
        if self._num_starts:
            self._socket_path.unlink(missing_ok=True)  # an executor that was killed leaves it
        self._num_starts += 1
        self._place = ExecutorPlace(f"ipc://{self._socket_path}", str(served.tokenizer), str(served.engine))
        self._task = ExecutorTask(str(served.engine), served.runtime, self._place.address, served.nodes)
        self._load_timeout_s = served.settings.load_timeout_s
        prestarted, self._prestarted = self._prestarted, None
        if prestarted is not None and prestarted.is_waiting:
            self.child = await prestarted.adopt(self._task)
        else:
            self.child = await self._start()
        self.child.mapped = _weight_files(Path(served.engine))
        return self.child

    async def _start(self) -> Child:
        """Start a process with the current task."""
        task = self._task
        devices = expected_devices(Path(task.engine), task.config, task.nodes)
        return await Child.start("executor", MODULE, task, devices, stop_signal=EXECUTOR_STOP_SIGNAL)

    async def relaunch(self) -> Child:
        """Start a process with the same task, and so with the same address. Returns when it is ready.

        Raises EngineError if it ends before that, or is not ready after load_timeout_s.
        """
        starting = asyncio.create_task(self._start())
        try:
            child = self.child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.child = await starting  # so that `terminate` ends it, too
            raise
        child.mapped = _weight_files(Path(self._place.engine))
        try:
            await asyncio.wait_for(self.wait_until_ready(), self._load_timeout_s)
        except TimeoutError:
            await child.stop(STOP_S)
            raise EngineError(f"it was not ready after load_timeout_s={self._load_timeout_s:g}") from None
        return child

    @property
    def _socket_path(self) -> Path:
        """The Unix socket of the newest executor. Each `launch` has another one: no frontend finds an executor of another engine."""
        return self._run_dir / f"executor{self._num_starts}"

    @property
    def address(self) -> str:
        """The ZeroMQ address at which the executor listens."""
        return self._place.address

    async def wait_until_ready(self) -> None:
        """Return when the executor is ready. Raises EngineError with its error if it ends before that."""
        child = self.child
        assert child is not None
        if (failure := await child.failure()) is not None:
            await child.process.wait()
            self.child = None
            raise EngineError(failure or f"the executor {child.ending}.")
        self.restarts.note_ready(child)

    async def read_settings(self) -> ServerSettings:
        """Read the files again, in a thread. Raises StokerError."""
        if self._read_again is not None:
            self._next = await asyncio.to_thread(self._read_again)
        return self._next.settings

    @property
    def running(self) -> bool:
        """Whether there is an executor."""
        return self.child is not None

    @property
    def must_start(self) -> bool:
        """Whether no executor is running, or one of another engine or with other settings than the files request."""
        return self.child is None or _identity(self._next) != self._running

    async def start(self) -> None:
        """Replace the executor if `must_start`. Raises EngineError."""
        if self.must_start:
            await self.stop()
            child = await self.launch()
            try:
                await self.wait_until_ready()
            except EngineError as error:
                log.error("the executor cannot start: %s", error)
                await self.withdraw(str(error))
                raise
            self._attach(child)
            await self.publish()

    async def stop(self) -> None:
        """End the executor after the requests of the frontends."""
        was_restarting = await self.restarts.cancel()
        if (child := self.child) is None and not was_restarting:
            return
        await self.withdraw(None)
        self.child = None
        if child is not None:
            self._detach(child)
            await child.stop(STOP_S)
        log.info("the executor has ended.")

    async def terminate(self) -> None:
        """End the executor. The frontends have ended already."""
        await self.restarts.cancel()
        if self.child is not None:
            await self.child.stop(STOP_S)

    async def publish(self) -> None:
        """Publish the place of the executor to the frontends. Returns when they have connected."""
        await self._coordinator.publish({EXECUTOR: self._place, FAILURE: None})

    async def withdraw(self, failure: str | None) -> None:
        """Publish that there is no executor. Returns when the requests of the frontends have ended."""
        await self._coordinator.publish({EXECUTOR: None, FAILURE: failure})


def _identity(served: ServedEngine) -> tuple[object, ...]:
    """A key of the engine's files and the runtime settings. An executor is replaced only if its key differs."""
    version: tuple[int, ...] = ()  # without a config.json, which the executor reports
    with contextlib.suppress(OSError):
        found = os.stat(served.engine / "config.json")
        version = (found.st_ino, found.st_mtime_ns)
    return (served.engine.resolve(), version, served.tokenizer.resolve(), served.runtime)


def _weight_files(engine: Path) -> dict[Path, int]:
    """The files of weights in the directory of an engine, with their sizes."""
    return {path: path.stat().st_size for path in sorted(engine.glob("*.safetensors"))}
