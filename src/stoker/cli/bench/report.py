"""What a benchmark leaves behind: a table on the terminal, and JSON that says where its numbers come from."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import stoker
from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.engine.reader import Engine

VERSIONS = ("torch", "triton", "numpy", "tokenizers")


def origin(engine: Path | None = None, device: str | None = None) -> dict[str, Any]:
    """Device, versions and commit; and the engine, when it is known."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name(device),
        "versions": {"stoker": stoker.__version__, "python": platform.python_version(), **_versions()},
        "commit": commit(),
    }
    if engine is not None:
        config = Engine.open(engine).config
        found["engine"] = {
            "checkpoint": config.checkpoint.name, "architecture": config.model.architecture, "dtype": config.dtype,
            "quantization": config.recipe.name, "weights": config.weights,
        }  # fmt: skip
    return found


def device_name(device: str | None = None) -> str:
    """The GPU's name when `device` is cuda, else the processor's and how many cores this process may use."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {len(cores())} cores"


def cpu_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets as the kernel names them; empty where it does not tell."""
    return next((set(line.partition(":")[2].split()) for line in _cpuinfo() if line.startswith("flags")), set())


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def commit() -> str | None:
    """The commit of the source tree that runs, with + when it is changed; where git does not know it, STOKER_COMMIT, or None."""
    source = Path(stoker.__file__).parent
    try:
        known = subprocess.run(["git", "-C", source, "ls-files", "__init__.py"], capture_output=True, text=True, check=True).stdout
        if not known.strip():
            return env.commit()
        told = subprocess.run(["git", "-C", source, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return env.commit()
    return told.stdout.strip()


def check_out(out: Path | None) -> None:
    """Raise ConfigError before anything is measured when the results could not be written to `out`."""
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise ConfigError(f"--json {out} cannot be written.", cure="Name a file in a folder that is there and may be written.")


def show(title: str, rows: list[dict[str, Any]], about: dict[str, Any], out: Path | None) -> None:
    """Print `rows` as a table, a column each; write all to `out` as JSON."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name in rows[0]:
        table.add_row(name, *(_cell(row[name]) for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console()
    console.print(table)
    console.print(f"{about['device']}; commit {about['commit']}", highlight=False, markup=False)
    if out is not None:
        out.write_text(json.dumps({"benchmark": title, **about, "results": rows}, indent=1) + "\n")


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values don't exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
