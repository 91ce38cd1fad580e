"""Measures candidate tiles for the shapes of an engine, and writes the fastest tile of each shape to the engine's tuning.json."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.kernels.tuning.devices import ENGINE_FILE
from stoker.kernels.tuning.table import TileKey, encode_tuning_file
from stoker.kernels.tuning.tiles import Tile

Progress = Callable[[str, int, int | None], object]
Measure = Callable[[TileKey, list[Tile]], dict[Tile, float]]  # microseconds of each tile that can run
Candidates = Callable[[TileKey], list[Tile]]


def engine_tile_keys(engine: Path, capability: int) -> list[TileKey]:
    """The rows of a tuning table that the steps of `engine` look up, on a device of `capability` (90: sm_90). Needs no GPU.

    They are listed in a separate process, because Triton's compilation target is process-wide. Raises EngineError when that fails.
    """
    variables = {name: value for name, value in env.child_environment().items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "stoker.profiling.engine_tuning", str(engine), str(capability)]
    found = subprocess.run(command, env=variables, capture_output=True)
    if found.returncode:
        reason = "".join(found.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise EngineError(f"the kernel launches of {engine} cannot be listed: {reason}.", cure="Build the engine again.")
    return msgspec.json.decode(found.stdout, type=list[TileKey])


def tune_tiles(keys: list[TileKey], candidates: Candidates, measure: Measure, progress: Progress) -> dict[TileKey, Tile]:
    """The fastest candidate of each key. Keys for which no candidate can run are left out.

    `candidates(key)` returns tiles; `measure(key, tiles)` returns the time of each tile that runs.
    """
    best: dict[TileKey, Tile] = {}
    for done, key in enumerate(keys):
        progress("tiles", done, len(keys))
        times = measure(key, candidates(key))
        if times:
            best[key] = min(times, key=lambda tile: times[tile])
    progress("tiles", len(keys), len(keys))
    return best


def write_engine_tuning(engine: Path, device: str, capability: int, tiles: dict[TileKey, Tile]) -> Path:
    """Write tuning.json atomically, and return its path."""
    path = engine / ENGINE_FILE
    temporary = path.with_name(f"{ENGINE_FILE}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(encode_tuning_file(device, capability, tiles, "Measured by stoker tune."))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def main(engine: str, capability: int) -> None:
    """Write the keys of all tiles that the engine looks up to standard output, as JSON."""
    from stoker.engine.reader import Engine
    from stoker.kernels.tuning.table import requested_tiles
    from stoker.runtime.worker.aot_trace import kernels_of

    with requested_tiles() as keys:
        kernels_of(Engine.open(engine), capability)
    sys.stdout.buffer.write(msgspec.json.encode(list(keys)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
