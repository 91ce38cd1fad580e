"""Installs a real Triton Inference Server from pip, once, in its own virtual environment in the cache; for tests and comparisons.

    python scripts/real_triton.py REPOSITORY [--http-port 8000] [--grpc-port 8001] [--metrics-port 8002]

The wheel of nvidia-pytriton contains tritonserver 2.51 and its Python backend. It requires numpy < 2, and therefore has its own
environment. This checkout of Stoker is on the path of that environment. Executors run in the interpreter that starts this script
(STOKER_PYTHON), which has torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from filelock import FileLock

from stoker.base.env import cache_dir

PACKAGE = "nvidia-pytriton==0.7.0"
# The dependencies of Stoker's torch-free packages.
DEPENDENCIES = (
    "numpy<2", "msgspec>=0.19", "pyzmq>=26", "tokenizers>=0.21", "jinja2>=3.1", "starlette", "prometheus-client", "uvicorn", "httptools",
    "uvloop",
)  # fmt: skip
SOURCE = Path(__file__).resolve().parents[1] / "src"


class RealTriton:
    """The paths of an installed server."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.site = home / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        self.triton = self.site / "pytriton" / "tritonserver"

    @classmethod
    def installed(cls) -> RealTriton:
        """The server in the cache, which is installed if necessary. Raises CalledProcessError when pip fails."""
        home = cache_dir() / "tritonserver-0.7.0"
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            server = cls(home)
            if not (home / "complete").exists():
                server._install()
            server._put_stoker_on_path()
        return server

    def _install(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        venv.create(self.home, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(self.home / "bin" / "python"), "install", "-q", "--no-compile"]
        subprocess.run([*pip, "--no-deps", PACKAGE], check=True)  # its dependencies are those of its Python API, which no process imports
        subprocess.run([*pip, *DEPENDENCIES], check=True)
        self._copy_backend()
        (self.home / "complete").touch()

    def _copy_backend(self) -> None:
        """Copy the Python backend and its stub process into one folder, where the server looks for both. The wheel has two."""
        backend = self.home / "backends" / "python"
        backend.mkdir(parents=True, exist_ok=True)
        stub = self.triton / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
        source = self.triton / "backends" / "python"
        for file in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", stub):
            shutil.copy2(file, backend / file.name)
        (backend / stub.name).chmod(0o755)

    def _put_stoker_on_path(self) -> None:
        (self.site / "stoker.pth").write_text(f"{SOURCE}\n")

    def command(self, repositories: list[Path], ports: tuple[int, int, int], prefix: str) -> list[str]:
        """The command line of tritonserver. `ports`: of HTTP, gRPC and metrics; `prefix`: of the names of its shared memory."""
        http, grpc, metrics = ports
        return [
            str(self.triton / "bin" / "tritonserver"), *(f"--model-repository={repository}" for repository in repositories),
            f"--backend-directory={self.home / 'backends'}", f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}",
            "--disable-auto-complete-config", f"--backend-config=python,shm-region-prefix-name={prefix}", "--exit-timeout-secs=10",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        libraries = [str(self.site / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""]
        return {
            **os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "STOKER_PYTHON": sys.executable, "VIRTUAL_ENV": str(self.home),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port)
    options = parser.parse_args()
    server = RealTriton.installed()
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    command = server.command([options.repository], ports, f"stoker{os.getpid()}_")
    os.execve(command[0], command, server.environment())


if __name__ == "__main__":
    sys.exit(main())
