"""The frontends of one server. One that ends by itself is started again while the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from stoker.base.logging import get_logger
from stoker.server.processes.child import Child
from stoker.server.processes.restart_policy import RestartPolicy
from stoker.server.processes.tasks import FrontendTask

log = get_logger(__name__)

MODULE = "stoker.server.processes.frontend_entry"
MAX_RESTARTS = 5  # of one of several frontends in a row; after these, the server stops


class FrontendGroup:
    """`count` frontend processes with the same task.

    `count_restart` is called after each restart, and `give_up` with a frontend that is not started again.
    """

    def __init__(
        self, task: FrontendTask, count: int, give_up: Callable[[Child], None], count_restart: Callable[[], None] = lambda: None
    ) -> None:
        self.children: list[Child] = []
        self._task = task
        self._count = count
        self._give_up = give_up
        self._count_restart = count_restart
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> bool:
        """Whether a frontend that ends is started again, which is so if there are several, or the executor is started again, too."""
        return self._count > 1 or self._task.settings.restarts > 0

    async def start(self) -> None:
        """Start all processes."""
        self.children = list(await asyncio.gather(*(self._start_one(index) for index in range(self._count))))

    def keep_running(self) -> None:
        """Start each frontend again when it ends, until `stop`."""
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(self._count)]

    async def stop(self, timeout_s: float) -> None:
        """End all frontends: with SIGTERM, and with SIGKILL after `timeout_s`."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.stop(timeout_s) for child in self.children))

    async def _start_one(self, index: int) -> Child:
        """A new process with this index."""
        task, shared = self._task, dict[str, str]()
        if self._count > 1:  # prometheus-client sums the counters of several frontends through files in this directory
            task = msgspec.structs.replace(task, index=index)
            shared = {"PROMETHEUS_MULTIPROC_DIR": str(task.run_dir)}
        return await Child.start("frontend", MODULE, task, pass_fds=task.socket_fds, environment=shared)

    async def _keep(self, index: int) -> None:
        """Start the frontend with this index again whenever it ends. Returns after too many restarts in a row."""
        policy = RestartPolicy(MAX_RESTARTS if self._count > 1 else self._task.settings.restarts)
        policy.note_ready()
        while True:
            child = self.children[index]
            await child.process.wait()
            if (delay_s := policy.next_delay_s()) is None:
                return self._give_up(child)
            log.error("a frontend (process %d) %s; it is started again in %g s.", child.process.pid, child.ending, delay_s)
            await asyncio.sleep(delay_s)
            starting = asyncio.create_task(self._start_one(index))
            try:
                child = self.children[index] = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self.children[index] = await starting  # so that `stop` ends it, too
                raise
            except OSError as error:
                log.error("the frontend cannot be started again: %s.", error)
                return self._give_up(child)
            if await child.failure() is None:
                policy.note_ready()
                self._count_restart()
                log.info("the new frontend (process %d) is ready.", child.process.pid)
