"""Installs perf_analyzer from pip, once, in the cache; for tests of the requests that it and genai-perf send.

    python scripts/real_perf_analyzer.py -m ensemble -i grpc --async --streaming --input-data inputs.json -u localhost:8001

The wheel of tritonclient 2.51 is the last one whose perf_analyzer runs with glibc 2.36. It needs libcudart, which is another wheel, and
libb64, which is in the wheel of the Triton server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))
from real_triton import RealTriton

from stoker.base.env import cache_dir

PACKAGES = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79")
FILES = ("perf_analyzer", "libcudart.so.12")


class PerfAnalyzer:
    """The paths of the installed program."""

    def __init__(self, home: Path) -> None:
        self.program = home / "perf_analyzer"
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(home)}

    @classmethod
    def installed(cls) -> PerfAnalyzer:
        """The program in the cache, which is installed if necessary. Raises CalledProcessError when pip fails."""
        home = cache_dir() / "perf-analyzer-2.51.0"
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            if not (home / "complete").exists():
                _install(home)
        return cls(home)


def _install(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, *PACKAGES]
        subprocess.run(pip, check=True)
        for wheel in Path(folder).glob("*.whl"):
            _extract(wheel, home)
    (home / "perf_analyzer").chmod(0o755)
    (library,) = (RealTriton.installed().site / "nvidia_pytriton.libs").glob("libb64-*.so.0d")
    shutil.copy2(library, home / "libb64.so.0d")
    (home / "complete").touch()


def _extract(wheel: Path, home: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name in FILES:
                (home / Path(name).name).write_bytes(archive.read(name))


if __name__ == "__main__":
    analyzer = PerfAnalyzer.installed()
    os.execve(analyzer.program, [str(analyzer.program), *sys.argv[1:]], analyzer.environment)
