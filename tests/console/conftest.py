from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), *(str(ROOT / "tests" / area) for area in ("frontend", "server"))]
NO_NETWORK = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The packages of console/package-lock.json, installed once until the lock file changes. Skips if npm is missing or offline."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    lock = (ROOT / "console" / "package-lock.json").read_bytes()
    folder = ROOT / ".cache" / "tests" / f"console-{hashlib.sha256(lock).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "installed").exists():
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(ROOT / "console" / name, folder)
            ran = subprocess.run([npm, "ci", "--ignore-scripts"], cwd=folder, capture_output=True, text=True, timeout=100)
            if ran.returncode and any(code in ran.stderr for code in NO_NETWORK):
                pytest.skip(f"npm cannot download packages: {ran.stderr[-300:]}")
            assert ran.returncode == 0, ran.stderr
            (folder / "installed").touch()
    return folder / "node_modules"
