"""The frontends of one server. When one of several ends by itself, it is started again while the others continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stoker.base.logging import get_logger
from stoker.server.processes.child import Child
from stoker.server.processes.tasks import FrontendTask

log = get_logger(__name__)

MODULE = "stoker.server.processes.frontend_entry"
MAX_RESTARTS = 5  # of one frontend in a row; after these, the server stops
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0  # before a restart; the delay doubles with each restart in a row
STABLE_S = 60.0  # a frontend that ran for this time starts with no restarts again


class FrontendGroup:
    """`count` frontend processes with the same task. `give_up` is called with a frontend that is not started again."""

    def __init__(self, task: FrontendTask, count: int, give_up: Callable[[Child], None]) -> None:
        self.children: list[Child] = []
        self._task = task
        self._count = count
        self._give_up = give_up
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> bool:
        """Whether a frontend that ends is started again, which is so if there are several."""
        return self._count > 1

    async def start(self) -> None:
        """Start all processes."""
        self.children = list(await asyncio.gather(*(self._start_one() for _ in range(self._count))))

    def keep_running(self) -> None:
        """Start each frontend again when it ends, until `stop`."""
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(self._count)]

    async def stop(self, timeout_s: float) -> None:
        """End all frontends: with SIGTERM, and with SIGKILL after `timeout_s`."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.stop(timeout_s) for child in self.children))

    async def _start_one(self) -> Child:
        """A new process."""
        # prometheus-client sums the counters of several frontends through files in this directory.
        shared = {"PROMETHEUS_MULTIPROC_DIR": str(self._task.run_dir)} if self._count > 1 else {}
        return await Child.start("frontend", MODULE, self._task, pass_fds=self._task.socket_fds, environment=shared)

    async def _keep(self, index: int) -> None:
        """Start the frontend with this index again whenever it ends. Returns after MAX_RESTARTS in a row."""
        num_restarts, started = 0, time.monotonic()
        while True:
            child = self.children[index]
            await child.process.wait()
            num_restarts = 1 if time.monotonic() - started > STABLE_S else num_restarts + 1
            if num_restarts > MAX_RESTARTS:
                return self._give_up(child)
            delay_s = min(FIRST_DELAY_S * 2 ** (num_restarts - 1), MAX_DELAY_S)
            log.error("a frontend (process %d) %s; it is started again in %g s.", child.process.pid, child.ending, delay_s)
            await asyncio.sleep(delay_s)
            starting = asyncio.create_task(self._start_one())
            try:
                child = self.children[index] = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self.children[index] = await starting  # so that `stop` ends it, too
                raise
            except OSError as error:
                log.error("the frontend cannot be started again: %s.", error)
                return self._give_up(child)
            started = time.monotonic()
            if await child.failure() is None:
                log.info("the new frontend (process %d) is ready.", child.process.pid)
