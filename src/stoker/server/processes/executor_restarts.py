"""Starts a failed executor again, at the same address, where the frontends find it by themselves.

Meanwhile the frontends are alive and not ready: they answer with status 503 and the reason. An executor that does not answer for
step_timeout_s is ended first.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from stoker.base.errors import EngineError, UnavailableError
from stoker.base.logging import get_logger
from stoker.server.processes.child import Child
from stoker.server.processes.restart_policy import RestartPolicy

log = get_logger(__name__)

CONTACT_S = 3.0  # after the executor counts as lost, it may end or answer for this time
POLL_S = 0.5
CONNECT_S = 120.0  # an executor that is ready answers within this time


class Restartable(Protocol):
    """The executor that is started again."""

    child: Child | None

    @property
    def address(self) -> str:
        """The ZeroMQ address at which the executor listens."""

    async def relaunch(self) -> Child:
        """Start a process with the same task. Returns when it is ready. Raises EngineError if it ends before that."""


class ExecutorRestarts:
    """The restarts of the executor of `control`.

    With `ends_hung`, or if it is started again, an executor that hangs is ended. `report` is called with the reason when the executor has
    failed, and with None when it is ready again. `attach` is called with the new process, and with one that is not started again, which
    then stops the server.
    """

    def __init__(
        self,
        control: Restartable,
        max_restarts: int,
        attach: Callable[[Child], None],
        report: Callable[[str | None], None],
        *,
        ends_hung: bool,
    ) -> None:
        self._control = control
        self._policy = RestartPolicy(max_restarts)
        self._ends_hung = ends_hung or max_restarts > 0
        self._attach = attach
        self._report = report
        self._ready: Child | None = None  # the executor, once it was ready
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def note_ready(self, child: Child) -> None:
        """The executor is ready. From now on it is started again if it fails."""
        self._ready = child
        self._policy.note_ready()
        if self._ends_hung:
            self._stop_watching()
            self._watching = asyncio.create_task(end_when_hung(child, self._control.address))

    def begin(self, child: Child) -> bool:
        """Begin to start the executor again, whose process `child` has ended. False if this is not to be done."""
        if child is not self._ready or (delay_s := self._policy.next_delay_s()) is None:
            return False
        self._stop_watching()
        self._restarting = asyncio.create_task(self._restart(child, delay_s))
        return True

    async def cancel(self) -> bool:
        """Stop watching and restarting. A process that is being started remains as `child` of the control.

        Returns whether the executor was being started again.
        """
        self._ready = None
        self._stop_watching()
        restarting, self._restarting = self._restarting, None
        if restarting is None or restarting.done():
            return False
        restarting.cancel()
        await asyncio.wait({restarting})
        return True

    async def _restart(self, failed: Child, delay_s: float | None) -> None:
        """Start the executor again until it is ready, or until there were too many restarts in a row."""
        ending, policy = failed.ending, self._policy
        while delay_s is not None:
            restart = f"restart {policy.num_restarts} of {policy.max_restarts}"
            log.error("the executor (process %d) %s; it is started again in %g s (%s).", failed.process.pid, ending, delay_s, restart)
            self._report(f"the executor {ending} and is started again ({restart})")
            await asyncio.sleep(delay_s)
            try:
                child = await self._control.relaunch()
            except (EngineError, OSError) as error:
                ending, delay_s = f"could not be started again ({error})", policy.next_delay_s()
                continue
            self._attach(child)
            self._report(None)
            log.info("the new executor (process %d) is ready.", child.process.pid)
            return
        log.error("the executor %s, after %d restarts in a row.", ending, policy.max_restarts)
        self._attach(failed)

    def _stop_watching(self) -> None:
        """End the task that watches the executor."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None


async def end_when_hung(child: Child, address: str) -> None:
    """Send SIGKILL to the executor at `address` when it has not answered for its step_timeout_s."""
    from stoker.runtime.transport.zmq_client import ZmqExecutorClient  # imports much; the children have started

    try:
        client = await ZmqExecutorClient.connect(address, connect_timeout_s=CONNECT_S)
    except UnavailableError:
        if child.process.returncode is None:
            log.error("the executor (process %d) does not answer; it is ended.", child.process.pid)
            child.signal(signal.SIGKILL)
        return
    try:
        await _until_lost(child, lambda: client.alive)
        if child.process.returncode is None:
            log.error("the executor (process %d) has not answered for %g s; it is ended.", child.process.pid, client.info.step_timeout_s)
            child.signal(signal.SIGKILL)
    finally:
        await client.close()


async def _until_lost(child: Child, is_alive: Callable[[], bool]) -> None:
    """Return when the process has ended, or has not answered again CONTACT_S after it counted as lost."""
    ended, lost_s = asyncio.create_task(child.process.wait()), 0.0
    try:
        while not ended.done() and lost_s < CONTACT_S:
            await asyncio.wait({ended}, timeout=POLL_S)
            lost_s = 0.0 if is_alive() else lost_s + POLL_S
    finally:
        ended.cancel()
