"""Measures the router: decisions per second, added latency, and the end of a replica. `benchmarks/simulate.py` measures reuse.

    PYTHONPATH=src python benchmarks/router.py [decisions] [latency] [streams] [kill] [--json benchmarks/results/router.json]

decisions: choices for prompts of 512 to 1,500 tokens among 1,000 replicas, in one thread; median and best of five rounds.
latency: time to the first token of streamed requests through the router and directly, alternately, to the same stub replica.
streams: processor time of the router per event of 32 concurrent streams.
kill: one of four replicas ends while 64 requests run; the others finish.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from stoker.cli.benchmark.results import provenance
from stoker.router.core.policy import Route
from stoker.router.core.prefix import token_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Lease, Router
from stoker.router.core.settings import RoutingSettings

BLOCK = 64
NUM_REPLICAS = 1000

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / area) for area in ("router", "server", "frontend")]  # stub replicas


def measure_decisions(num_rounds: int = 5, num_decisions: int = 5000) -> dict[str, float]:
    """Decisions per second of CPU time: hash the prompt, choose, count the request, and end an earlier one."""
    dice = random.Random(0)
    router = Router(RoutingSettings())
    for i in range(NUM_REPLICAS):
        replica = router.fleet.add(f"http://10.0.{i // 256}.{i % 256}:8000")
        replica.publishes_events = True
        router.fleet.set_health(replica, ReplicaState.READY, 0.0)
    systems = [[dice.randrange(128_000) for _ in range(512)] for _ in range(100)]
    prompts = [systems[i % 100] + [dice.randrange(128_000) for _ in range(dice.randrange(1000))] for i in range(3000)]
    for prompt in prompts:
        router.fleet.stored.store(dice.randrange(NUM_REPLICAS), token_prefix(prompt, BLOCK).hashes)
    hashing, deciding = [], []
    leases: list[Lease] = []
    for _ in range(num_rounds):
        started = time.process_time()
        prefixes = [token_prefix(prompts[i % len(prompts)], BLOCK) for i in range(num_decisions)]
        hashed = time.process_time()
        for i, prefix in enumerate(prefixes):
            route = Route(prefix=prefix, session=f"session {i}" if i % 2 else "")
            decision = router.choose(route)
            assert decision is not None
            leases.append(router.begin(route, decision))
            if len(leases) > 4 * NUM_REPLICAS:
                leases.pop(0).succeed()
        ended = time.process_time()
        hashing.append(num_decisions / (hashed - started))
        deciding.append(num_decisions / (ended - hashed))
    mean_tokens = statistics.mean(map(len, prompts))
    return {
        "replicas": NUM_REPLICAS, "mean_prompt_tokens": mean_tokens,
        "decisions_per_s_median": statistics.median(deciding), "decisions_per_s_best": max(deciding),
        "prompts_hashed_per_s_median": statistics.median(hashing), "prompts_hashed_per_s_best": max(hashing),
    }  # fmt: skip


async def _measure_streams(num_streams: int = 32, num_tokens: int = 500) -> dict[str, float]:
    """The processor time of the router per chunk of a stream, for streams of tokens that arrive one by one."""
    import aiohttp

    async with contextlib.AsyncExitStack() as stack:
        replica, _ = await _program(stack, "replica")
        router, pid = await _program(stack, "router", replica)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"prompt": "hi", "max_tokens": num_tokens, "stream": True}

        async def read() -> int:
            """Read one stream. Returns the number of its events."""
            async with client.post(router + "/v1/completions", json=body) as response:
                return (await response.read()).count(b"data: ")

        await read()
        before = _cpu_s(pid)
        events = sum(await asyncio.gather(*(read() for _ in range(num_streams))))
        cpu_s = _cpu_s(pid) - before
        return {
            "streams": num_streams,
            "events": events,
            "router_cpu_us_per_event": cpu_s / events * 1e6,
            "events_per_s_of_cpu": events / cpu_s,
        }


async def _first_token_s(client: Any, url: str, text: str) -> float:
    """Seconds from the start of a streamed chat request to its first bytes."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    started = time.perf_counter()
    async with client.post(url + "/v1/chat/completions", json=body) as response:
        await response.content.readany()
        elapsed = time.perf_counter() - started
        await response.read()
    return elapsed


async def _measure_latency(num_requests: int = 400) -> dict[str, float]:
    """The router, one replica and the client are processes of their own, as in production."""
    import aiohttp

    async with contextlib.AsyncExitStack() as stack:
        replica, _ = await _program(stack, "replica")
        router, pid = await _program(stack, "router", replica)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        direct, routed = [], []
        cpu_s = _cpu_s(pid)
        for i in range(num_requests):
            text = f"{i}: " + "some words of a prompt " * 80
            for url, times in ((replica, direct), (router, routed)) if i % 2 else ((router, routed), (replica, direct)):
                times.append(await _first_token_s(client, url, text))
        cpu_s = _cpu_s(pid) - cpu_s
        skipped = num_requests // 10
        direct, routed = direct[skipped:], routed[skipped:]
        return {
            "requests": len(direct),
            "direct_median_ms": statistics.median(direct) * 1e3,
            "routed_median_ms": statistics.median(routed) * 1e3,
            "added_median_ms": statistics.median([b - a for a, b in zip(direct, routed, strict=True)]) * 1e3,
            "added_p90_ms": (statistics.quantiles(routed, n=10)[8] - statistics.quantiles(direct, n=10)[8]) * 1e3,
            "router_cpu_ms_per_request": cpu_s / num_requests * 1e3,
            "load_average": os.getloadavg()[0],
            "text_prefixes": True,
        }


def _cpu_s(pid: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _program(stack: contextlib.AsyncExitStack, kind: str, *args: str) -> tuple[str, int]:
    """Start this file as another process that serves. Returns its URL and its process id."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, f"--serve-{kind}", *args, stdout=asyncio.subprocess.PIPE)

    async def stop() -> None:
        process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().split()[-1], process.pid


async def _serve_replica() -> None:
    from routed import StubReplica
    from scripted_service import ScriptedService

    stub = StubReplica(ScriptedService("Hello there " * 50, max_input_len=1 << 16, max_output_len=1024))
    await stub.start()
    print(stub.url, flush=True)
    await asyncio.Event().wait()


def _serve_router(replica: str) -> None:
    from stoker.router.proxy.serve import serve
    from stoker.router.settings import RouterSettings

    serve(RouterSettings(replicas=(replica,), http_port=0, access_log=True), lambda line: print(line.split(" (")[0], flush=True))


async def _measure_kill() -> dict[str, float]:
    from routed import replicas, routed
    from scripted_service import ScriptedService

    services = [ScriptedService("Hello " * 10, max_output_len=256, max_batch_size=64) for _ in range(4)]
    for service in services:
        service.hold = asyncio.Event()
    async with replicas(*services) as stubs, routed(stubs, routing=RoutingSettings(max_in_flight=64)) as (_, client):
        body = {"prompt": "hi", "stream": True, "max_tokens": 60}
        requests = [asyncio.create_task(client.post("/v1/completions", json={**body, "user": str(i)})) for i in range(64)]
        while sum(len(service.requests) for service in services) < 64:
            await asyncio.sleep(0.01)
        killed = len(services[0].requests)
        started = time.perf_counter()
        await stubs[0].kill()
        while sum(len(service.requests) for service in services) < 64 + killed:
            await asyncio.sleep(0.001)
        repeated_s = time.perf_counter() - started
        for service in services:
            assert service.hold is not None
            service.hold.set()
        answers = await asyncio.gather(*requests)
        lost = sum(answer.status_code != 200 or "[DONE]" not in answer.text or "error" in answer.text for answer in answers)
        return {"requests": 64, "on_the_killed_replica": killed, "lost": lost, "all_repeated_after_s": repeated_s}


def main() -> None:
    if sys.argv[1:2] == ["--serve-replica"]:
        asyncio.run(_serve_replica())
        return
    if sys.argv[1:2] == ["--serve-router"]:
        _serve_router(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {
        "decisions": measure_decisions,
        "latency": lambda: asyncio.run(_measure_latency()),
        "streams": lambda: asyncio.run(_measure_streams()),
        "kill": lambda: asyncio.run(_measure_kill()),
    }
    parser.add_argument("kinds", nargs="*", default=list(kinds))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    for kind in args.kinds:
        results[kind] = kinds[kind]()
        results.setdefault("provenance", {})[kind] = provenance()
        print(kind, json.dumps(results[kind], indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
