"""The results of a benchmark: a table on the terminal, and a JSON file that also describes the machine and the commit."""

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
from stoker.cli.benchmark.machine import device_name

PACKAGES = ("torch", "triton", "numpy", "tokenizers")


def provenance(engine: Path | None = None, device: str | None = None) -> dict[str, Any]:
    """Facts about a measurement: date, device, package versions and commit, and the engine when one is given."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name(device),
        "versions": {"stoker": stoker.__version__, "python": platform.python_version(), **_package_versions()},
        "commit": source_commit(),
    }
    if engine is not None:
        from stoker.engine.reader import Engine

        config = Engine.open(engine).config
        found["engine"] = {
            "checkpoint": config.checkpoint.name, "architecture": config.model.architecture, "dtype": config.dtype,
            "quantization": config.recipe.name, "weights": config.weights,
        }  # fmt: skip
    return found


def source_commit() -> str | None:
    """The commit of the running source tree, with + if it has uncommitted changes. Outside of git: STOKER_COMMIT, or None."""
    source = Path(stoker.__file__).parent
    try:
        tracked = subprocess.run(["git", "-C", source, "ls-files", "__init__.py"], capture_output=True, text=True, check=True).stdout
        if not tracked.strip():
            return env.commit()
        described = subprocess.run(["git", "-C", source, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return env.commit()
    return described.stdout.strip()


def check_output_file(file: Path | None) -> None:
    """Raise ConfigError if results cannot be written to `file`. Called before the measurement."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"--json {file} cannot be written.", cure="Name a file in an existing folder with write permission.")


def print_results(title: str, rows: list[dict[str, Any]], about: dict[str, Any], output: Path | None) -> None:
    """Print `rows` as a table with one column each. Write them with `about` to `output` as JSON, when a file is given."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name in rows[0]:
        table.add_row(name, *(_format_cell(row[name]) for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console()
    console.print(table)
    console.print(f"{about['device']}; commit {about['commit']}", highlight=False, markup=False)
    if output is not None:
        output.write_text(json.dumps({"benchmark": title, **about, "results": rows}, indent=1) + "\n")


def percentile(values: list[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _format_cell(value: Any) -> str:
    """A value as text, with four significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _package_versions() -> dict[str, str]:
    """The versions of the packages that affect speed, if they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
