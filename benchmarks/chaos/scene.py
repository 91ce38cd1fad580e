"""One run against one server: the quiet answers, the load with faults, and what remains afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from chaos.health import __file__ as HEALTH
from chaos.load import Client, Key, Target
from chaos.requests_by_protocol import Case
from chaos.resources import Sampler, descriptors, leaks, quiet, total_growth
from chaos.world import FAULTS, Fault, Skipped, World

WARM_UP_S = 10.0
QUIET_CLIENTS = 4
REPLACING = 0.4  # fraction of the time in which processes are replaced; new ones then have the time to reach their size
PAUSE_S = 1.0  # mean time between two faults
MAX_SLOPE = 1.0  # MB per minute, of all processes that are old enough


class Scene:
    """The run. `names` are the faults that may happen; `clients` is the number of requests in flight."""

    def __init__(self, world: World, cases: list[Case], clients: int, names: list[str]) -> None:
        self.world, self.clients = world, clients
        self._target = Target(world.server.host, world.server.port, world.server.grpc_port, cases)
        self._names = names
        self._failures: list[str] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        """Run for this time in addition to the quiet run; returns the results."""
        world, random = self.world, self.world.random
        quiet_requests = await self._quiet_run()
        keys = sorted(self._target.answers.keys() - self._target.unstable)
        await self._load(keys, min(WARM_UP_S, seconds / 4), rude=False)
        before = await quiet(world.server)
        say(f"{quiet_requests} quiet requests; {len(keys)} are sent with faults")
        opened = descriptors(world.server)
        sampler, started = Sampler(world.server), time.monotonic()
        sampling = asyncio.create_task(sampler.run())
        async with probed(world.server.host, world.server.port) as health:
            stop = asyncio.Event()
            load = [asyncio.create_task(self._client().run(keys, Random(random.random()), stop, rude=True)) for _ in range(self.clients)]
            await self._faults(list(FAULTS.values()), started + seconds * REPLACING)
            middle = max(time.monotonic(), started + seconds / 2)
            await self._faults([fault for fault in FAULTS.values() if not fault.replaces], started + seconds)
            end = time.monotonic()
            stop.set()
            ended = await asyncio.gather(*load, return_exceptions=True)
            self._failures += [f"a client failed: {error!r}" for error in ended if isinstance(error, BaseException)]
        say("the load has ended")
        sampling.cancel()
        after = await quiet(world.server, before)
        opened = {role: {name: number - opened.get(role, {}).get(name, 0) for name, number in counts.items()}
                  for role, counts in descriptors(world.server).items()}  # fmt: skip
        growth = sampler.growth(middle, end)
        return {
            "seconds": round(end - started, 1),
            "clients": self.clients,
            "quiet_requests": quiet_requests,
            "unstable_quiet_answers": sorted(map(list, self._target.unstable)),
            "requests": sum(world.ledger.totals.values()),
            "outcomes": world.ledger.totals,
            "outcomes_by_kind": {kind: dict(counts) for kind, counts in sorted(world.ledger.outcomes.items())},
            "refusals": dict(world.ledger.reasons.most_common()),
            "refusals_outside_of_faults": dict(world.ledger.quiet_refusals.most_common()),
            "faults": dict(sorted(world.counts.items())),
            "skipped_faults": dict(sorted(world.skipped.items())),
            "failures": self._failures,
            "examples": world.ledger.examples,
            "before": before,
            "after": after,
            "leaks": leaks(before, after),
            "more_descriptors": {role: {name: n for name, n in counts.items() if n > 0} for role, counts in opened.items()},
            "memory_slope_mb_per_min": total_growth(growth),
            "memory_by_process": growth,
            "health_ms": json.loads(health[0]) if health and health[0] else None,
        }

    def _client(self) -> Client:
        return Client(self._target, self.world.ledger)

    async def _quiet_run(self) -> int:
        """Note the answer of each request, and then which of them a full batch changes. Returns the number of requests."""
        keys = self._target.keys()
        await self._answers(keys, QUIET_CLIENTS, self._target.answers)
        again: dict[Key, str] = {}
        await self._answers(keys, self.clients, again)
        self._target.unstable = {key for key in keys if again[key] != self._target.answers[key]}
        return 2 * len(keys)

    async def _answers(self, keys: list[Key], clients: int, answers: dict[Key, str]) -> None:
        """Send each request once. Raises RuntimeError if one is not answered."""
        waiting = list(keys)

        async def work() -> None:
            client = self._client()
            while waiting:
                key = waiting.pop()
                outcome, text = await client.send(key)
                if outcome != "answered":
                    raise RuntimeError(f"the quiet server did not answer {key}: {outcome}: {text}")
                answers[key] = text
            await client.close()

        await asyncio.gather(*(work() for _ in range(clients)))

    async def _load(self, keys: list[Key], seconds: float, *, rude: bool) -> None:
        """The load without faults."""
        stop = asyncio.Event()
        random = self.world.random
        load = [asyncio.create_task(self._client().run(keys, Random(random.random()), stop, rude=rude)) for _ in range(self.clients)]
        await asyncio.sleep(seconds)
        stop.set()
        await asyncio.gather(*load)

    async def _faults(self, faults: list[Fault], end_s: float) -> None:
        """Cause these faults in random order, each once before one is repeated, until the time ends."""
        world, waiting = self.world, list[Fault]()
        while (left_s := end_s - time.monotonic()) > 0 and world.server.process.poll() is None:
            if not waiting:
                roles = {"", *(role for role, _ in world.server.processes())}
                possible = [
                    fault for fault in faults if fault.name in self._names and fault.role in roles and fault.name not in world.skipped
                ]
                waiting = world.random.sample(possible, len(possible))
            await asyncio.sleep(min(left_s, world.random.expovariate(1 / PAUSE_S) * world.scale))
            if waiting:
                await self._cause(waiting.pop())

    async def _cause(self, fault: Fault) -> None:
        """Cause one fault."""
        world, started = self.world, time.monotonic()
        try:
            with world.ledger.fault(fault.name, cuts=fault.cuts):
                await fault.cause(world)
            world.counts[fault.name] += 1
        except Skipped as reason:
            world.skipped[fault.name] = str(reason)
        except (OSError, RuntimeError) as error:
            self._failures.append(f"{fault.name}: {error}"[:1000])
            say(self._failures[-1])
        say(f"{fault.name}: {time.monotonic() - started:.1f} s; {sum(world.ledger.totals.values())} requests")


def say(line: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def probed(host: str, port: int) -> Any:
    """Probe the health of the server during the block; afterwards the list that it yields contains the report."""
    report: list[str] = []
    command = [sys.executable, str(Path(HEALTH)), host, str(port)]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        yield report
    finally:
        output, _ = await process.communicate(b"\n")
        report.append(output.decode())


def faults_of(result: dict[str, Any]) -> list[str]:
    """Why the result misses a target; empty if it misses none."""
    found = [f"{result['outcomes'][name]} {name} requests" for name in ("wrong", "lost") if result["outcomes"][name]]
    found += [*result["leaks"], *result["failures"]]
    slope = result["memory_slope_mb_per_min"]
    if slope is not None and slope >= MAX_SLOPE:
        processes = ", ".join(f"{each['role']} {each['mb_per_min']}" for each in result["memory_by_process"] if each["mb_per_min"])
        found.append(f"memory grows by {slope} MB/min ({processes})")
    return found
