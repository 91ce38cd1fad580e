"""`mpirun -n 2 stoker serve`: each process of Open MPI runs a rank, and all end with the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from free_ports import free_port

MPIRUN = next((path for path in (f"{sysconfig.get_path('scripts')}/mpirun", shutil.which("mpirun")) if path and Path(path).exists()), None)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (package openmpi)")
def test_two_processes_serve_an_engine_of_two_ranks(engine: Callable[[str], Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "STOKER_CLUSTER_TOKEN": "t" * 32, "OMP_NUM_THREADS": "1"}
    command = [
        str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "STOKER_CLUSTER_TOKEN", sys.executable, "-m", "stoker",
        "serve", str(engine("stages")), "--rendezvous", f"127.0.0.1:{free_port()}", "--port", "0", "--num-threads", "1",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while (served := re.search(r"is served at (http://127\.0\.0\.1:\d+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert "2 ranks on 2 nodes: pipeline across nodes" in log.read_text() and "node 1 runs rank 0" in log.read_text()
        body = json.dumps({"model": "engine", "prompt": "the quick", "max_tokens": 8, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{served[1]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGTERM)
        process.wait(20)  # the status is 1 after any SIGTERM to mpirun
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
