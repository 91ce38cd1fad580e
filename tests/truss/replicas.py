"""A test program. Starts argv[2] processes on the folder argv[1] at the same time. Each prints its engine and whether it built it."""

from __future__ import annotations

import multiprocessing
import os
import sys

from stoker.builder.prepare import prepare
from stoker.deploy.prepare import build_config, prepare_engine, read_deployment


def replica(folder: str, start: multiprocessing.synchronize.Barrier) -> None:
    stages: set[str] = set()
    start.wait(60)
    found = prepare_engine(read_deployment(folder, {}), {}, lambda stage, done, total: stages.add(stage))
    origin = "built" if "weights" in stages else "found"
    os.write(1, f"{found.engine} {origin}\n".encode())  # one write, because the other processes write to the same pipe


def main() -> int:
    count, context = int(sys.argv[2]), multiprocessing.get_context("fork")
    deployment = read_deployment(sys.argv[1], {})
    prepare(deployment.source.checkpoint, build_config(deployment))  # type: ignore[union-attr]  # imports modules once, before the fork
    start = context.Barrier(count)
    processes = [context.Process(target=replica, args=(sys.argv[1], start)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
