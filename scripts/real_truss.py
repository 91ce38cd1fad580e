"""Installs the real truss package and its model server, once, in their own virtual environment in the cache; for tests and comparisons.

    python scripts/real_truss.py TRUSS [--port 8080]

truss requires rich < 14, and its server FastAPI < 0.125 and numpy < 2, and therefore they have their own environment. Docker is not
required: the build context that truss writes is copied to a temporary folder as its Dockerfile would copy it. Stoker runs in the
interpreter that starts this script (STOKER_PYTHON).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from filelock import FileLock

from stoker.base.env import cache_dir

PACKAGE = "truss==0.18.35"
# Those of the server's requirements that it imports; MODEL: those of the exported model.py.
SERVER = (
    "fastapi==0.124.4", "numpy<2", "msgpack==1.1.0", "python-json-logger", "prometheus-client", "psutil", "uvicorn", "uvloop",
    "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-grpc",
)  # fmt: skip
MODEL = ("httpx",)
_CONTEXT = """
import sys
from pathlib import Path
from truss.truss_handle.truss_handle import TrussHandle
TrussHandle(Path(sys.argv[1])).build_docker_build_context(Path(sys.argv[2]))
"""


class RealTruss:
    """The paths of an installed truss package."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "bin" / "python"

    @classmethod
    def installed(cls) -> RealTruss:
        """The package in the cache, which is installed if necessary. Raises CalledProcessError when pip fails."""
        home = cache_dir() / "truss-0.18.35"
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            truss = cls(home)
            if not (home / "complete").exists():
                truss._install()
        return truss

    def _install(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        venv.create(self.home, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-compile"]
        subprocess.run([*pip, PACKAGE, *SERVER, *MODEL], check=True)
        (self.home / "complete").touch()

    def write_app(self, truss: Path, app: Path) -> None:
        """Write to `app` the files that an image built by truss would run. The server listens on the loopback interface only."""
        with tempfile.TemporaryDirectory() as work:
            context = Path(work) / "context"
            environment = {**os.environ, "HOME": work}  # truss writes settings into the home
            subprocess.run([self.python, "-c", _CONTEXT, truss, context], check=True, env=environment)
            shutil.copytree(context / "server", app)
            for folder in ("model", "packages"):
                shutil.copytree(context / folder, app / folder)
            shutil.copy2(context / "config.yaml", app)
        program = app / "truss_server.py"
        program.write_text(program.read_text().replace('host="0.0.0.0"', 'host="127.0.0.1"'))

    def environment(self, port: int) -> dict[str, str]:
        own = {"INFERENCE_SERVER_PORT": str(port), "DISABLE_JSON_LOGGING": "1", "STOKER_PYTHON": sys.executable}
        return {**os.environ, **own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truss", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    truss = RealTruss.installed()
    with tempfile.TemporaryDirectory() as work:
        app = Path(work) / "app"
        truss.write_app(options.truss, app)
        return subprocess.run([truss.python, "main.py"], cwd=app, env=truss.environment(options.port)).returncode


if __name__ == "__main__":
    sys.exit(main())
