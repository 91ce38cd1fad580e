"""The server under test as a program: a Triton repository with explicit model control, and all protocols beside it.

    python benchmarks/chaos/serve.py REPOSITORY SETTINGS_JSON [--stub]

`stoker tritonserver` has the model control but only the KServe protocol, and `stoker serve` has all protocols without the model control.
With --stub, the executor is stub_executor.py, which has no model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.base.logging import configure
from stoker.cli.repository_server import prepare_repository, with_options
from stoker.server.processes import executor_control
from stoker.server.processes.supervisor import serve
from stoker.server.processes.tasks import ServedEngine


def main() -> int:
    configure()
    repository, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "--stub" in sys.argv:
        executor_control.MODULE = "chaos.stub_executor"
    try:
        served = read(repository, changes)
        return serve(
            served.engine,
            served.runtime,
            served.settings,
            lambda line: print(line, flush=True),
            tokenizer=served.tokenizer,
            read_again=lambda: read(repository, changes),
        )
    except StokerError as error:
        print(error, file=sys.stderr)
        return 2


def read(repository: Path, changes: dict[str, Any]) -> ServedEngine:
    """The engine of the repository, with `changes` of its settings: {"settings": {...}, "runtime": {...}}. Raises StokerError."""
    prepared, _ = prepare_repository(repository)
    settings = msgspec.structs.replace(prepared.settings, protocols=(), **changes["settings"])
    settings = with_options(settings, model_control="explicit", load_models=("*",))
    runtime = msgspec.structs.replace(prepared.runtime, **changes["runtime"])
    return ServedEngine(engine=prepared.engine, tokenizer=prepared.tokenizer or prepared.engine, runtime=runtime, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
