"""One replica of an engine: an actor that runs `stoker serve` on its host, and an actor on each further host of the replica."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import aiohttp
import msgspec
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stoker.base import env
from stoker.base.logging import get_logger
from stoker.ray.autoscaling import INGRESS_WAITING, KV_USAGE, SEQUENCES
from stoker.ray.keys import Keys
from stoker.ray.placement import Placement, actor_options
from stoker.ray.server_process import ServerProcess, free_port
from stoker.ray.settings import EngineSettings
from stoker.server.replica_report import ReplicaReport

log = get_logger(__name__)

REPORT_TIMEOUT_S = 5.0
CHECK_S = 1.0
INGRESS_S = 5.0  # an ingress that has not called for this time is gone


class HostActor:
    """The ranks of one host other than the first one of a replica."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    async def start(self, settings: EngineSettings, options: dict[str, Any], environment: dict[str, str]) -> None:
        """Start the process of the ranks."""
        self._server = ServerProcess(settings.command, options, environment)
        await self._server.start()

    async def failure(self) -> str | None:
        """Why the process has ended; None while it runs."""
        return self._server.failure if self._server is not None else None


class EngineReplica:
    """The class of the deployments. Requests do not pass through this actor: the ingress sends them to the server at `url`."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, settings: EngineSettings, placement: Placement, keys: Keys
    ) -> None:
        env.set_keys(keys.variables)
        self._settings = settings
        self._hosts: list[Any] = []
        self._starts: list[asyncio.Future[None]] = []  # of the processes of the hosts
        self._ingresses: dict[str, tuple[float, int]] = {}  # id → (time of its last call, its waiting requests)
        address = settings.listen or ray.util.get_node_ip_address()
        environment = settings.env | keys.variables
        options = self._options(address)
        if settings.nodes > 1:
            environment["STOKER_CLUSTER_TOKEN"] = secrets.token_hex(32)
            shared = {"nnodes": settings.nodes, "rendezvous": f"{address}:{free_port(address)}"}
            shared["rendezvous-timeout-s"] = settings.start_timeout_s
            options |= shared
            self._start_hosts(placement, options, environment)
            options = options | {"node-rank": 0}
        self._server = ServerProcess(settings.command, options, environment)
        await self._server.start()
        self.url = await self._wait_until_ready()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REPORT_TIMEOUT_S))

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica after an exception."""
        await self._check_processes()

    async def _check_processes(self) -> None:
        """Raise RuntimeError if the process of a host has ended, or could not be started."""
        for rank, start in enumerate(self._starts, start=1):
            if start.done() and (error := start.exception()) is not None:
                raise RuntimeError(f"the process of host {rank} of the replica could not be started: {error}") from error
        failures = [self._server.failure, *await asyncio.gather(*(host.failure.remote() for host in self._hosts))]
        if failure := next((failure for failure in failures if failure), None):
            raise RuntimeError(failure)

    async def describe(self, ingress: str, num_waiting: int) -> str:
        """The URL of the server. An ingress calls this twice a second, and reports its requests that wait."""
        self._ingresses[ingress] = (time.monotonic(), num_waiting)
        return self.url

    async def wake(self) -> None:
        """Does nothing: Ray Serve starts a replica for this call if there is none."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve: what `EnginePolicy` needs."""
        key = env.api_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.get(f"{self.url}/health/replica", headers=headers) as response:
            response.raise_for_status()
            report = msgspec.json.decode(await response.read(), type=ReplicaReport)
        now = time.monotonic()
        waiting = sum(count for seen, count in self._ingresses.values() if now - seen < INGRESS_S)
        return {SEQUENCES: float(report.num_sequences), KV_USAGE: report.kv_usage, INGRESS_WAITING: float(waiting)}

    async def __del__(self) -> None:
        """Called by Ray Serve after requests of Ray: end after the requests in flight at the server."""
        if hasattr(self, "_session"):
            await self._session.close()
        if hasattr(self, "_server"):
            await self._server.stop(self._settings.drain_timeout_s + 5)

    async def _wait_until_ready(self) -> str:
        """The URL of the server. Raises UnavailableError and RuntimeError if the process of a host ends before."""
        waiting = asyncio.create_task(self._server.wait_until_ready(self._settings.start_timeout_s))
        while not (await asyncio.wait([waiting], timeout=CHECK_S))[0]:
            await self._check_processes()
        return await waiting

    def _options(self, address: str) -> dict[str, Any]:
        """The options of `stoker serve`, without those of the nodes."""
        settings = self._settings
        options = {key.replace("_", "-"): value for key, value in settings.serve.items()}
        options |= {
            "model": settings.model, "model-name": settings.name, "host": address, "port": free_port(address),
            "drain-timeout-s": settings.drain_timeout_s,
        }  # fmt: skip
        if _has_grpc():
            options["grpc-port"] = free_port(address)
        if settings.kv_events:
            options["kv-events"] = f"tcp://{address}:{free_port(address)}"
            options["kv-events-replay"] = f"tcp://{address}:{free_port(address)}"
        return options

    def _start_hosts(self, placement: Placement, options: dict[str, Any], environment: dict[str, str]) -> None:
        """Start the actors of the further hosts, which end with this one."""
        group = ray.util.get_current_placement_group()
        assert group is not None, "Ray Serve places each replica in a placement group"
        for rank in range(1, self._settings.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = ray.remote(HostActor).options(
                **actor_options(placement.bundles[rank]), scheduling_strategy=strategy, max_concurrency=4,
                runtime_env={"env_vars": ray.get_runtime_context().runtime_env.get("env_vars", {})},
            )  # fmt: skip
            host: Any = actor.remote()
            start = host.start.remote(self._settings, options | {"node-rank": rank}, environment)
            self._starts.append(asyncio.ensure_future(start))
            self._hosts.append(host)


def _has_grpc() -> bool:
    """Whether the packages of the gRPC port are installed."""
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("grpc", "tritonclient"))
