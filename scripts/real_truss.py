"""The real truss package and its model server, for tests and comparisons: a venv of its own in the cache, made once.

    python scripts/real_truss.py TRUSS [--port 8080]

truss wants rich < 14 and its server FastAPI < 0.125 and numpy < 2, hence the venv. Without docker: the build context that truss writes
is laid out as its Dockerfile does, in a temporary folder. Stoker runs in the interpreter that starts this script (STOKER_PYTHON).
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
# Of the server's own requirements, what it imports; then what the exported model.py does.
SERVER = (
    "fastapi==0.124.4", "numpy<2", "msgpack==1.1.0", "python-json-logger", "prometheus-client", "psutil", "uvicorn", "uvloop",
    "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-grpc",
)  # fmt: skip
MODEL = ("tritonclient[grpc]", "httpx")
_CONTEXT = """
import sys
from pathlib import Path
from truss.truss_handle.truss_handle import TrussHandle
TrussHandle(Path(sys.argv[1])).build_docker_build_context(Path(sys.argv[2]))
"""


class RealTruss:
    """An installed truss."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "bin" / "python"

    @classmethod
    def installed(cls) -> RealTruss:
        """The package in the cache, installed when it is not there yet. Raises CalledProcessError when pip cannot."""
        home = cache_dir() / "truss-0.18.35"
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            found = cls(home)
            if not (home / "complete").exists():
                found._install()
        return found

    def _install(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        venv.create(self.home, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-compile"]
        subprocess.run([*pip, PACKAGE, *SERVER, *MODEL], check=True)
        (self.home / "complete").touch()

    def lay_out(self, truss: Path, app: Path) -> None:
        """What truss makes of a Truss, in the folder that its image would run. The server listens on the loopback alone."""
        with tempfile.TemporaryDirectory() as work:
            context = Path(work) / "context"
            environment = {**os.environ, "HOME": work}  # truss writes settings into the home
            subprocess.run([self.python, "-c", _CONTEXT, truss, context], check=True, env=environment)
            shutil.copytree(context / "server", app)
            for part in ("model", "packages"):
                shutil.copytree(context / part, app / part)
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
    asked = parser.parse_args()
    found = RealTruss.installed()
    with tempfile.TemporaryDirectory() as work:
        app = Path(work) / "app"
        found.lay_out(asked.truss, app)
        return subprocess.run([found.python, "main.py"], cwd=app, env=found.environment(asked.port)).returncode


if __name__ == "__main__":
    sys.exit(main())
