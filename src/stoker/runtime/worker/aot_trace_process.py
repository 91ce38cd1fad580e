"""The process that lists the kernels of an engine: python -m stoker.runtime.worker.aot_trace_process ENGINE CAPABILITY."""

from __future__ import annotations

import sys

import msgspec

from stoker.base.process import importing


def main(path: str, capability: int) -> None:
    """Write the jobs of the engine at `path` to standard output, as JSON."""
    with importing():
        from stoker.engine.reader import Engine
        from stoker.runtime.worker.aot_trace import kernels_of
    jobs = kernels_of(Engine.open(path), capability)
    sys.stdout.buffer.write(msgspec.json.encode(list(jobs.values())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
