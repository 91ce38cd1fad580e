"""A fleet with several routers, each with its part of the replicas and of the requests, simulated by several processes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import msgspec

from stoker.base.config import check_range
from stoker.base.cpus import num_cpus
from stoker.base.errors import ConfigError
from stoker.router.core.settings import RoutingSettings
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import FORMATS_WITH_PREFIXES, RepeatedBlocks, TracedRequest, read_trace
from stoker.simulation.transfers import TransferSettings

MAX_REPLICAS = 100_000
BATCH = 1024  # requests of one router that are simulated together, so that the state of its replicas stays in the CPU's cache


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a simulation."""

    file: Path
    format: str = "mooncake"
    rate: float = 1.0  # factor of the request rate
    max_requests: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1e6:
            raise ConfigError(f"rate={self.rate} is refused.", cure="Use a factor above 0 and at most 1000000.")
        if self.max_requests is not None:
            check_range("max_requests", self.max_requests, 1, 1 << 40)

    def requests(self, wanted: Seq[bool] = (True,)) -> Iterator[TracedRequest | None]:
        """The first requests of the trace, of which those that are not `wanted` are None. Raises ConfigError for a malformed trace."""
        return itertools.islice(read_trace(self.file, self.format, wanted), self.max_requests)


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas and their routers.

    Each router has the same number of replicas, or one more, and forwards every `num_routers`-th request of the trace to them.
    """

    num_replicas: int = 1
    num_prefill: int = 0
    num_routers: int = 1
    replica: ReplicaSettings
    step_times: StepTimes
    routing: RoutingSettings = RoutingSettings()
    transfers: TransferSettings = TransferSettings()
    frontend: FrontendTimes = FrontendTimes()

    def __post_init__(self) -> None:
        check_range("replicas", self.num_replicas, 1, MAX_REPLICAS)
        check_range("prefill_replicas", self.num_prefill, 0, MAX_REPLICAS)
        check_range("routers", self.num_routers, 1, MAX_REPLICAS)
        for name, count in (("replicas", self.num_replicas), ("prefill_replicas", self.num_prefill)):
            if count and count < self.num_routers:
                raise ConfigError(f"routers={self.num_routers} exceeds {name}={count}.", cure="Each router needs at least one.")

    def simulator(self, router: int, prefix_reuse: bool) -> Simulator:
        """The part of the fleet behind one router, for prompts that contain no answers."""
        shares = [count // self.num_routers + (router < count % self.num_routers) for count in (self.num_replicas, self.num_prefill)]
        return Simulator(
            shares[0], self.replica, self.step_times, self.routing, shares[1], self.transfers,
            prefix_reuse=prefix_reuse, index_answers=False, frontend=self.frontend,
        )  # fmt: skip


def simulate_fleet(fleet: FleetSettings, trace: TraceSettings, num_workers: int | None = None) -> Results:
    """Simulate all requests of a trace in `num_workers` processes; None: one per CPU, if there are as many routers.

    The results do not depend on the number of processes. Raises ConfigError for a malformed trace.
    """
    if num_workers is not None:
        check_range("workers", num_workers, 1, 1024)
    num_workers = min(num_workers or num_cpus(), fleet.num_routers)
    if num_workers == 1:
        return _simulate_routers(fleet, trace, range(fleet.num_routers))
    parts = [range(worker, fleet.num_routers, num_workers) for worker in range(num_workers)]
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        first, *others = pool.map(_simulate_routers, itertools.repeat(fleet), itertools.repeat(trace), parts)
    for results in others:
        first.merge(results)
    return first


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector run rarely. It would need a quarter of the time, and objects of a simulation form no cycles."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _repeated_blocks(trace: TraceSettings, wanted: Seq[bool]) -> RepeatedBlocks | None:
    """The blocks that occur at least twice in these requests. None if the file can be read only once."""
    if not trace.file.is_file():
        return None
    repeated = RepeatedBlocks()
    for request in trace.requests(wanted):
        if request is not None:
            repeated.add(request.block_ids)
    return repeated


@_rare_collections()
def _simulate_routers(fleet: FleetSettings, trace: TraceSettings, routers: range) -> Results:
    """Simulate the requests of some of the routers."""
    prefix_reuse = trace.format in FORMATS_WITH_PREFIXES or bool(fleet.num_prefill)
    simulators = {router: fleet.simulator(router, prefix_reuse) for router in routers}
    waiting: dict[int, list[TracedRequest]] = {router: [] for router in routers}
    wanted = [router in simulators for router in range(fleet.num_routers)]
    # A prompt that moves between replicas is found by its blocks, whether others have them or not.
    repeated = _repeated_blocks(trace, wanted) if trace.format in FORMATS_WITH_PREFIXES and not fleet.num_prefill else None

    def simulate(router: int) -> None:
        """Simulate the requests that wait at a router."""
        tokens_per_block = fleet.replica.tokens_per_block if prefix_reuse else None
        simulators[router].add_all(request.arrival(tokens_per_block, repeated, trace.rate) for request in waiting[router])
        waiting[router].clear()

    for router, request in zip(itertools.cycle(range(fleet.num_routers)), trace.requests(wanted), strict=False):
        if request is not None:
            waiting[router].append(request)
            if len(waiting[router]) == BATCH:
                simulate(router)
    for router in routers:
        simulate(router)
    first, *others = [simulator.finish() for simulator in simulators.values()]
    for results in others:
        first.merge(results)
    return first
