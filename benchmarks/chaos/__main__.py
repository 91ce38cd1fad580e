"""Chaos test: all protocols at full load, while processes are killed and stopped, resources run out and clients misbehave.

    python benchmarks/chaos [--minutes 30] [--seed 0] [--device cpu] [--clients 64] [--output FILE.json]

A seed determines the requests, the behaviour of clients, and the order and duration of faults. A ledger accounts for every request: it has
the answer of the quiet run that precedes, or is refused with a reason in the format of its protocol, or the client left on purpose, or the
process that held its connection was killed. Everything else is wrong or lost. Exit status 1 if a request is wrong or lost, if something
that the server holds does not return to its initial value, or if the memory of its processes grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)

from chaos import model_faults, process_faults, resource_faults  # noqa: E402
from chaos.engines import make_engine, make_repository  # noqa: E402
from chaos.ledger import Ledger  # noqa: E402
from chaos.requests_by_protocol import make_cases  # noqa: E402
from chaos.scene import Scene, faults_of  # noqa: E402
from chaos.server import Server  # noqa: E402
from chaos.world import FAULTS, Skipped, World  # noqa: E402

from stoker.cli.benchmark.results import provenance  # noqa: E402

SHARES = {"1-rank": 3, "2-ranks": 2, "stub": 1}  # of the time, by executor
NUM_CASES = 12
STEP_TIMEOUT_S = 5.0
MAX_RESTARTS = 1000  # in a row
FAULT_MODULES = (model_faults, process_faults, resource_faults)  # their import fills FAULTS


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clients", type=int, default=64, help="requests in flight")
    parser.add_argument("--engines", nargs="+", choices=SHARES, default=list(SHARES), help="executors, one server after the other")
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS), help="only these")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--log", type=Path, help="where the log of the server is written")
    args = parser.parse_args()
    results = {}
    shares = sum(SHARES[engine] for engine in args.engines)
    for engine in args.engines:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            results[engine] = await one(Path(folder), args, engine, args.minutes * SHARES[engine] / shares)
    found = {
        "seed": args.seed,
        **provenance(device=args.device),
        "load": round(os.getloadavg()[0], 1),
        "runs": results,
        "faults_found": [f"{name}: {text}" for name, result in results.items() for text in faults_of(result)],
    }
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["faults_found"] else 0


async def one(folder: Path, args: argparse.Namespace, kind: str, minutes: float) -> dict[str, Any]:
    """Start a server with this kind of executor, run against it, and stop it. Returns the results."""
    random, reasons, environment = Random(args.seed), dict[str, str](), {"OMP_NUM_THREADS": "1"}
    disk: Path | None = folder / "disk"
    try:
        resource_faults.mount_disk(folder / "disk")
    except Skipped as reason:
        disk, reasons["disk"] = None, str(reason)
    try:
        environment |= resource_faults.build_clock(folder)
    except Skipped as reason:
        reasons["clock"] = str(reason)
    settings: dict[str, Any] = {"num_frontends": 2, "restarts": MAX_RESTARTS, "retry_unstarted": True}
    settings |= {"exit_on_error": False, "grpc_port": 0 if has_grpc() else None}
    if disk is not None:
        (disk / "tmp").mkdir()
        environment["TMPDIR"] = str(disk / "tmp")
        settings["state_dir"] = str(disk / "state")
    engine = make_engine(folder, args.device, 2 if kind == "2-ranks" else 1)
    repository = make_repository(engine, folder / "repository")
    runtime = {"num_threads": 1, "step_timeout_s": STEP_TIMEOUT_S}
    server = Server(repository, folder / "log", settings, runtime, environment, stub=kind == "stub")
    server.start()
    try:
        await server.wait_until_ready()
        world = World(server, Ledger(), random, folder, engine, min(1.0, max(0.3, minutes / 5)))
        world.stub = kind == "stub"
        world.disk, world.disk_reason, world.step_timeout_s = disk, reasons.get("disk", ""), STEP_TIMEOUT_S
        result = await Scene(world, make_cases(random, NUM_CASES), args.clients, args.faults).run(minutes * 60)
        result["exit_status"] = await server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()
        log = server.log.read_text()
        if args.log:
            args.log.with_suffix(f".{kind}{args.log.suffix}").write_text(log)
        if disk is not None:
            resource_faults.unmount_disk(disk)
    return {**result, "tracebacks": log.count("Traceback (most recent call last)")}


def has_grpc() -> bool:
    """Whether the packages of the gRPC client and server are installed."""
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("grpc", "tritonclient"))


async def stoppable() -> int:
    """Run `main`, and stop the server after SIGINT or SIGTERM."""
    task = asyncio.create_task(main())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(asyncio.run(stoppable()))
