"""The supervisor process: starts one executor process and the frontend processes, watches them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger, log_event
from stoker.base.nodes import NodeSettings
from stoker.base.start_times import StartTimes
from stoker.server.coordination import Values
from stoker.server.processes.child import Child
from stoker.server.processes.coordinator import SupervisorCoordinator
from stoker.server.processes.executor_control import ExecutorControl, ReadAgain
from stoker.server.processes.frontend_group import FrontendGroup
from stoker.server.processes.key_reload import KeyReload
from stoker.server.processes.listeners import address_of, listen, reserve, with_metrics_port
from stoker.server.processes.prestart import Prestarted
from stoker.server.processes.running import registered
from stoker.server.processes.systemd import ServiceManager
from stoker.server.processes.tasks import FAILURE, RESTARTS, FrontendTask, ServedEngine
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.settings import ServerSettings
from stoker.server.state_directory import StateDirectory
from stoker.server.telemetry.log_control import follow_log

log = get_logger(__name__)

FAILING_S = 1.0  # after the executor has ended, frontends answer with status 503 for this long before the port closes
STOP_S = 10.0  # between the end of the drain time and SIGKILL


def serve(
    engine: Path | str,
    runtime: RuntimeConfig,
    settings: ServerSettings,
    announce: Callable[[str], None] = print,
    *,
    tokenizer: Path | str | None = None,
    listeners: list[socket.socket] | None = None,
    read_again: ReadAgain | None = None,
    prestarted: Prestarted | None = None,
    nodes: NodeSettings = NodeSettings(),
    times: StartTimes | None = None,
) -> int:
    """Serve the engine directory until SIGINT or SIGTERM. Returns the exit status: 0 after a signal, 1 if a child process ended by itself.

    One of several frontends that ends is started again instead, and with `restarts` also the executor and the only frontend. After the
    first signal no new connections are accepted, and requests in flight have drain_timeout_s to end, and are then answered with an error.
    The second signal stops the server at once. systemd receives the state of the server if it has started this process.

    `tokenizer` is a directory whose tokenizer replaces the engine's own. `listeners` are the sockets of `listen` if they are open already.
    `read_again` returns what to serve after a reload. `prestarted` is the process of the executor, if it is running already. `nodes`: those
    of the ranks, of which this process is the first. `times` has the stages of the start so far. `announce` is called with one line that
    contains the URL when the server is ready.
    Raises ConfigError if an address, the certificate or the state directory cannot be used, and the error of an executor that cannot start.
    """
    if settings.state_dir is not None:
        StateDirectory(settings.state_dir).close()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listeners or listen(settings)]
        grpc = stack.enter_context(reserve(settings.host, settings.grpc_port)) if settings.grpc_port is not None else None
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-"))
        settings = msgspec.structs.replace(settings, state_dir=settings.state_dir or str(Path(run_dir) / "state"))
        served = ServedEngine(engine=Path(engine), tokenizer=Path(tokenizer or engine), runtime=runtime, settings=settings, nodes=nodes)
        supervisor = Supervisor(served, listeners, grpc, Path(run_dir), announce, read_again, prestarted, times)
        return asyncio.run(supervisor.run())


class Supervisor:
    """Starts the processes, watches them, and stops them in order: frontends first, then the executor."""

    def __init__(
        self,
        served: ServedEngine,
        listeners: list[socket.socket],
        grpc: socket.socket | None,
        run_dir: Path,
        announce: Callable[[str], None],
        read_again: ReadAgain | None = None,
        prestarted: Prestarted | None = None,
        times: StartTimes | None = None,
    ) -> None:
        self._served = served
        self._times = times or StartTimes()
        self._settings = served.settings
        self._listeners = listeners
        self._grpc_address = address_of(grpc) if grpc is not None else None
        self._run_dir = run_dir
        self._announce = announce
        self._name = served.settings.model_name or served.engine.resolve().name
        self._stop = asyncio.Event()
        self._children: list[Child] = []  # those whose end stops the server
        self._ended: asyncio.Queue[Child] = asyncio.Queue()
        self._coordinator = SupervisorCoordinator()
        follow_log(self._coordinator)
        self._frontends = self._frontend_group()
        self._systemd = ServiceManager()
        self._executor = ExecutorControl(
            served, run_dir, self._coordinator, read_again, self._attach, self._detach, self._report_executor,
            ends_hung=self._systemd.watchdog_s is not None, prestarted=prestarted,
        )  # fmt: skip
        self._keys = KeyReload(served.settings, run_dir, self._coordinator)
        self._num_restarts = {"executor": 0, "frontend": 0}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start the children, serve until a signal or the end of a child, and stop the children. Returns the exit status.

        Raises ConfigError or EngineError if the executor reports one instead of becoming ready.
        """
        started = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if self._settings.api_keys_file is not None or self._systemd.exists:  # otherwise SIGHUP, as of a closed terminal, ends the server
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: self._run_task(self._reload()))
        self._systemd.report("Loading the engine.")
        await self._keys.start()
        socket = await self._coordinator.listen(self._run_dir)
        executor = await self._executor.launch() if runs_executor(self._settings) else None
        if executor is not None:
            self._times.reached("task sent")
            await self._executor.publish()
            if self._settings.exit_on_error:
                self._attach(executor)
        await self._frontends.start()
        for child in self._frontends.children:
            self._attach(child)
        if not self._frontends.restarts:
            self._close_listeners()
        frontends = asyncio.gather(*(child.ready() for child in self._frontends.children))
        ready = asyncio.gather(self._note("executor ready", self._executor_ready(executor)), self._note("frontends ready", frontends))
        with registered(self.url, self._name, self._served.engine):
            failed = await self._watch(ready, started)
        refusal = await failed.refusal() if failed is not None and failed is executor and not ready.done() else None
        if failed is not None and refusal is None:
            log.error("the %s %s; the server stops.", failed.name, failed.ending)
        await self._end(failing=failed is not None and failed not in self._frontends.children and ready.done())
        socket.close()
        await self._coordinator.close()
        ready.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ready
        if refusal is not None:
            raise refusal
        return 0 if failed is None else 1

    async def _executor_ready(self, executor: Child | None) -> None:
        """Return when the executor is ready. Without exit_on_error, also when it has failed, which the frontends then report."""
        from stoker.server.protocols.kserve.model_control import ModelControl  # imports much; the children have started

        control = ModelControl(self._coordinator, self._settings, self._executor)
        if executor is None:
            return
        try:
            await self._executor.wait_until_ready()
        except EngineError as error:
            if self._settings.exit_on_error and executor not in self._children:
                return  # a client has unloaded the model while it was loaded
            if self._settings.exit_on_error:
                await asyncio.Event().wait()  # the end of the process stops the server
            log.error("%s The server stays without the model.", error)
            await self._executor.withdraw(str(error))
            await control.engine_failed(str(error))
        else:
            if not self._settings.exit_on_error:
                self._attach(executor)

    async def _note(self, stage: str, work: Awaitable[object]) -> None:
        """Wait for `work`, and note the time of a stage of the start."""
        await work
        self._times.reached(stage)

    def _attach(self, child: Child) -> None:
        """Watch a child from now on: the server stops when it ends."""
        self._children.append(child)
        task = asyncio.create_task(child.process.wait())
        task.add_done_callback(lambda _: self._ended.put_nowait(child))

    def _detach(self, child: Child) -> None:
        """The child may end, which does not stop the server."""
        if child in self._children:
            self._children.remove(child)

    def _report_executor(self, failure: str | None) -> None:
        """Tell the frontends and systemd that the executor has failed and is started again, or, with None, that it is ready again."""
        if failure is None:
            self._num_restarts["executor"] += 1
        self._systemd.report(self._status if failure is None else f"Not ready: {failure}.")
        self._publish({FAILURE: failure, RESTARTS: dict(self._num_restarts)})

    def _count_frontend_restart(self) -> None:
        """Publish that one more frontend was started again."""
        self._num_restarts["frontend"] += 1
        self._publish({RESTARTS: dict(self._num_restarts)})

    async def _reload(self) -> None:
        """Read the file of API keys again, which systemd shows as a reload."""
        self._systemd.reloading()
        await self._keys.reload()
        self._systemd.ready(self._status)

    def _publish(self, changes: Values) -> None:
        """Publish changes, and do not wait until all frontends have applied them."""
        self._run_task(self._coordinator.publish(changes))

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task until it ends, or until the end of the server."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, ready: asyncio.Future[Any], started: float) -> Child | None:
        """Announce the server when all children are ready. Returns None after a stop signal, or the child that ended by itself."""
        ends = {asyncio.create_task(self._failed_child()), asyncio.create_task(self._stop.wait())}
        await asyncio.wait({*ends, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            self._log_addresses()
            if self._frontends.restarts:
                for child in self._frontends.children:
                    self._detach(child)
                self._frontends.keep_running()
            log_event(log, logging.INFO, self._times.report("the server"))
            self._announce(f"{self._status} (ready after {time.monotonic() - started:.1f} s)")
            self._systemd.ready(self._status)
            self._run_task(self._systemd.keep_alive(lambda: self._coordinator.publish({})))  # returns when all frontends have received it
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in ends if task.done()]
        for task in ends:
            task.cancel()
        return None if self._stop.is_set() else next(child for child in results if isinstance(child, Child))

    async def _failed_child(self) -> Child:
        """The first child that ends without having been detached, and that is not started again."""
        while True:
            child = await self._ended.get()
            if child in self._children and not self._executor.restarts.begin(child):
                return child
            self._detach(child)

    @property
    def _status(self) -> str:
        """The state of a server that is ready, as systemd shows it."""
        return f"{self._name} is served at {self.url}"

    @property
    def url(self) -> str:
        """The address of the server, with http or https."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{'https' if self._settings.tls_key else 'http'}://{host}:{self._port}"

    def _log_addresses(self) -> None:
        """Log the lines of a Triton server for which scripts wait."""
        if self._grpc_address is not None:
            log.info("Started GRPCInferenceService at %s", self._grpc_address)
        log.info("Started HTTPService at %s", self._addresses[0])
        if len(self._addresses) > 1:
            log.info("Started Metrics Service at %s", self._addresses[1])

    def _frontend_group(self) -> FrontendGroup:
        """The frontends, which are not started yet."""
        self._port = self._listeners[0].getsockname()[1]
        self._addresses = [address_of(listener) for listener in self._listeners]
        fds = [listener.fileno() for listener in self._listeners]
        settings = with_metrics_port(self._settings, self._listeners)
        if self._grpc_address is not None:  # the actual port, also if grpc_port is 0
            settings = msgspec.structs.replace(settings, grpc_port=int(self._grpc_address.rpartition(":")[2]))
        task = FrontendTask(self._name, settings, fds, self._grpc_address, str(self._run_dir))
        return FrontendGroup(task, self._settings.num_frontends, self._attach, self._count_frontend_restart)

    def _close_listeners(self) -> None:
        """Close this process's copies of the listening sockets, so that no connection waits when the frontends have closed theirs."""
        for listener in self._listeners:
            listener.close()

    async def _end(self, *, failing: bool) -> None:
        """Stop the children. With `failing`, first leave clients the time to receive error responses."""
        self._close_listeners()
        self._systemd.stopping("The server stops because a process has failed." if failing else "The server stops.")
        if failing:
            await asyncio.sleep(FAILING_S)
        grace_s = self._settings.drain_timeout_s + STOP_S
        await self._frontends.stop(grace_s)
        await self._executor.terminate()

    def _on_signal(self) -> None:
        """Stop after the first signal, and kill the children after the second."""
        if self._stop.is_set():
            for child in {*self._children, *self._frontends.children}:
                child.signal(signal.SIGKILL)
        elif self._settings.drain_timeout_s:
            log.info(
                "stopping; requests in flight have %.0f s to end. A second signal stops the server at once.", self._settings.drain_timeout_s
            )
        self._stop.set()


def runs_executor(settings: ServerSettings) -> bool:
    """Whether the executor runs from the start: always, unless explicit model control loads no model that needs it."""
    options = settings.options
    if not isinstance(options, TritonOptions):
        return True
    return any(options.is_loaded_at_start(model.name) for model in options.models)
