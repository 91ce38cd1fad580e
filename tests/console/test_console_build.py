"""The committed files of the console are those that its source builds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src/stoker/server/protocols/console/static"


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_committed_files_are_those_of_the_source(node_modules: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "console", tmp_path / "out"
    shutil.copytree(ROOT / "console", source, ignore=shutil.ignore_patterns("node_modules"))
    (source / "node_modules").symlink_to(node_modules)
    for tool, *arguments in (("tsc",), ("vite", "build", "--logLevel", "error")):
        command = [str(node_modules / ".bin" / tool), *arguments]
        ran = subprocess.run(command, cwd=source, env={**os.environ, "CONSOLE_OUT": str(out)}, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert files_of(out) == files_of(STATIC), "run npm ci && npm run build in console/, and commit the result"


def test_the_lock_file_names_no_registry() -> None:
    lock = (ROOT / "console" / "package-lock.json").read_text()
    assert '"resolved"' not in lock and '"integrity"' in lock
