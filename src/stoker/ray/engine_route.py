"""The replicas of one engine as an ingress sees them: a router whose replicas follow those of the Ray Serve deployment."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from stoker.base import env
from stoker.base.logging import get_logger
from stoker.ray.placement import is_local_tokenizer
from stoker.ray.settings import EngineSettings, IngressSettings
from stoker.router.core.settings import RoutingSettings
from stoker.router.proxy.application import RouterApplication
from stoker.router.settings import RouterSettings

log = get_logger(__name__)

FOLLOW_S = 0.5
DESCRIBE_TIMEOUT_S = 2.0


class EngineRoute:
    """`application` routes requests of the engine. `handle` is the handle of its deployment."""

    def __init__(self, engine: EngineSettings, ingress: IngressSettings, handle: Any) -> None:
        self.engine = engine
        self._handle = handle
        self._id = uuid.uuid4().hex
        self._urls: set[str] = set()  # of the replicas that Ray Serve has named
        self._changed = asyncio.Event()
        self._waking: asyncio.Task[None] | None = None
        tokenizer = ingress.tokenizer or (engine.model if is_local_tokenizer(engine.model) else None)
        routing = RoutingSettings(
            policy=ingress.policy, max_retries=ingress.max_retries, unavailable_timeout_s=ingress.unavailable_timeout_s,
            queue_timeout_s=ingress.unavailable_timeout_s,
        )  # fmt: skip
        settings = RouterSettings(
            host=ingress.host, tokenizer=tokenizer, replica_api_key=env.api_key(), admin_key=env.admin_key(), routing=routing,
            max_request_bytes=ingress.max_request_bytes, access_log=ingress.access_log,
        )  # fmt: skip
        self.application = RouterApplication(settings)
        self.application.router.on_unavailable = self._wake

    @property
    def is_available(self) -> bool:
        """Whether a request can be served: by a replica, or by one that it starts."""
        return bool(self.application.router.fleet.available) or (self.engine.min_replicas == 0 and not self._urls)

    def serves(self, model: str) -> bool:
        """Whether a client may name this model of the engine."""
        return model == self.engine.name or model in self.application.router.fleet.models()

    async def open(self) -> None:
        """Start to follow the replicas, after those that exist were checked."""
        await self.application.open()
        await self._follow()
        self._following = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End all tasks, and close the connections to the replicas."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self.application.close()

    async def _run(self) -> None:
        """Follow the replicas until the task is cancelled."""
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await self._changed.wait()
            try:
                await self._follow()
            except Exception:
                log.exception("the replicas of %s are not known", self.engine.name)

    async def _follow(self) -> None:
        """Add the replicas that Ray Serve runs, and remove the others. One that does not answer in time changes nothing."""
        if not self._handle.is_initialized:
            self._handle._init()
        try:
            response = self._handle.broadcast("describe", self._id, self.application.router.num_waiting)
            answers = await response.results_async(timeout_s=DESCRIBE_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            answers = []
        except TimeoutError:
            return
        found = {answer for answer in answers if isinstance(answer, str)}
        for url in found - self._urls:
            self._urls.add(url)
            if url not in self.application.router.fleet:
                self.application.checker.check_soon(self.application.add(url))
        if len(found) < len(answers):  # a replica ends, or has no time to answer: its health checks decide
            return
        for url in self._urls - found:
            self._urls.discard(url)
            if (replica := self.application.router.fleet.get(url)) is not None:
                await self.application.remove(replica)

    def _wake(self) -> None:
        """A request waits because no replica is available: let Ray Serve start one if there is none."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._call_wake())

    async def _call_wake(self) -> None:
        """Call a method of the deployment, which waits in Ray Serve's queue, and is counted there, until a replica runs."""
        try:
            await self._handle.wake.remote()
        except Exception as error:
            log.warning("no replica of %s could be started: %s", self.engine.name, error)
        self._changed.set()
