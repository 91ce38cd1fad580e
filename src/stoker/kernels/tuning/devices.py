"""Selects the tuning table of a device: files of this package, and the tables of loaded engines before them."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.kernels.tuning.table import TuningFile, TuningTable, parse_tuning_file

log = get_logger(__name__)

FOLDER = Path(__file__).parent
DEFAULT = "default"  # the file with the safe choices of devices that were not measured
ENGINE_FILE = "tuning.json"

_engine_tables: dict[str, TuningTable] = {}  # device name → the merged tables of the engines that this process has loaded


@cache
def tuning_for(device_name: str | None, capability: int) -> TuningTable:
    """The tuning table of a device. `device_name` is None when only the compute capability is known, in ahead-of-time compilation.

    A device of another name, but of the capability of a file without names, uses that file. Any other gets the safe default, and one line
    is logged that explains how to measure it.
    """
    engine = _engine_tables.get(device_name) if device_name is not None else None
    table = _shipped_table(device_name, capability)
    if table is None:
        table = dataclasses.replace(_table_of(DEFAULT), device=device_name or f"sm_{capability}")
        if device_name is not None and engine is None:
            log.warning(
                "no kernel tiles were measured for %s (sm_%d): safe default tiles are used, which may be slower. "
                "To measure them, run: stoker tune ENGINE",
                device_name,
                capability,
            )
    return table if engine is None else table.override(engine)


def use_engine_tuning(engine: Path, device_name: str) -> None:
    """From now on, use the tiles of `engine`/tuning.json, if that file exists, before those of this package.

    The file is written by `stoker tune` after the build, so config.json has no digest of it: every value is checked instead, and a file of
    another device is ignored with a warning. Engines that one process loads share their tiles; for equal shapes the last one is used.
    Raises ConfigError naming the file, the key and the value.
    """
    path = engine / ENGINE_FILE
    if not path.exists():
        return
    file, table = parse_tuning_file(path)
    if file.device != device_name:
        both = f"it was measured on {file.device}, and this device is {device_name}"
        log.warning("%s is not used: %s. Run: stoker tune %s", path, both, engine)
        return
    earlier = _engine_tables.get(device_name)
    _engine_tables[device_name] = table if earlier is None else earlier.override(table)
    tuning_for.cache_clear()
    log.info("%d tiles of %s are used", len(table.tiles), path)


def _shipped_table(device_name: str | None, capability: int) -> TuningTable | None:
    """The table of this package for the device's name or else for its capability; None if there is none."""
    files = _shipped_files()
    for name, file in files.items():
        if device_name is not None and device_name.startswith(file.device_names or "\0"):
            return _table_of(name)
    by_capability = (name for name, file in files.items() if name == f"sm_{file.capability}" and file.capability == capability)
    return next((_table_of(name) for name in by_capability), None)


@cache
def _shipped_files() -> dict[str, TuningFile]:
    """All files of this package except the default, by name without the suffix."""
    return {path.stem: parse_tuning_file(path)[0] for path in sorted(FOLDER.glob("*.json")) if path.stem != DEFAULT}


@cache
def _table_of(name: str) -> TuningTable:
    """The table of one file of this package. Tiles, attention rows and costs come from the file that `same_as` names, if it is given."""
    file, table = parse_tuning_file(FOLDER / f"{name}.json")
    if file.same_as is None:
        return table
    other, shared = parse_tuning_file(FOLDER / f"{file.same_as}.json")
    if other.same_as is not None or table.tiles or table.attention:
        raise ConfigError(f"{FOLDER / name}.json: same_as={file.same_as!r} is refused: aliases have no rows, and name a file with rows.")
    return dataclasses.replace(shared, device=table.device, ceiling=table.ceiling)
