"""`stoker tritonserver`: the options of Triton's server program, and the commands that launch_triton_server.py runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sysconfig
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as thttp
import tritonclient.utils.shared_memory as tshm
from test_triton_commands import Run, run
from tritonserver_process import program, repository, started

__all__ = ["program", "repository", "run"]  # fixtures

MPIRUN = Path(sysconfig.get_path("scripts")) / "mpirun"


def launcher_command(program: Path, repository: Path, world_size: int, *more: str) -> list[str]:
    """The command that launch_triton_server.py (TensorRT-LLM 1.x) runs: one program per rank, each with all ports."""
    ports = ["--grpc-port=0", "--http-port=0", "--metrics-port=0"]
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe"]
    for rank in range(world_size):
        command += ["-n", "1", str(program), f"--model-repository={repository}", *ports]
        if rank:
            command += ["--model-control-mode=explicit", "--load-model=tensorrt_llm"]
        command += [*ports, "--http-address=127.0.0.1", *more]
        command += ["--disable-auto-complete-config", f"--backend-config=python,shm-region-prefix-name=prefix{rank}_", ":"]
    return command


LAUNCHER = pytest.mark.compatibility(
    protocol="Triton",
    client="launch_triton_server.py",
    version="TensorRT-LLM 1.x",
    feature="its commands under mpirun, --world_size 1 and 2",
)


@LAUNCHER
@pytest.mark.skipif(not MPIRUN.exists(), reason="the package openmpi is not installed")
def test_the_launcher_starts_two_ranks(repository: Callable[[int], Path], program: Path) -> None:
    """Rank 0 serves an engine of two ranks. The other process ends with it, and mpirun ends."""
    with started(launcher_command(program, repository(2), 2)) as (addresses, process, lines):
        body = {"text_input": "the quick", "max_tokens": 5}
        answer = httpx.post(f"http://{addresses['HTTPService']}/v2/models/ensemble/generate", json=body, timeout=60).json()
        assert answer["model_name"] == "ensemble" and answer["text_output"]
        named = [path.parent for path in Path("/proc").glob("[0-9]*/comm") if path.read_text() == "tritonserver\n"]
        ours = [path for path in named if str(program).encode() in (path / "cmdline").read_bytes()]
        assert len(ours) == 1, "pgrep tritonserver finds the server"
        os.kill(int(ours[0].name), signal.SIGTERM)  # rank 0 alone; mpirun itself receives no signal
        process.wait(60)
    log = "".join(lines)
    assert process.returncode == 0 and "rank 1 of 2 waits" in log and "Traceback" not in log, log


@LAUNCHER
@pytest.mark.skipif(not MPIRUN.exists(), reason="the package openmpi is not installed")
def test_a_number_of_processes_that_is_not_the_engines_is_rejected(repository: Callable[[int], Path], program: Path) -> None:
    done = subprocess.run(launcher_command(program, repository(1), 3), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "stoker: the number of processes 3: the engine has 1 rank. Use 1, or build another engine." in done.stderr


@LAUNCHER
def test_options_of_the_server_have_effect(repository: Callable[[int], Path], program: Path, tmp_path: Path) -> None:
    """Without mpirun, in explicit mode: only the models of --load-model are loaded. Two frontends have the same shared memory."""
    options = ["--model-control-mode=explicit", "--load-model", "preprocessing", "--id=mine", "--allow-metrics=true", "--log-verbose=1"]
    options += ["--with-test-models", "--load-model=simple", "--shared-memory=/stoker_test_*"]
    with started([*launcher_command(program, repository(1), 1)[5:-1], *options]) as (addresses, process, lines):
        http = f"http://{addresses['HTTPService']}"
        assert httpx.get(f"{http}/v2", timeout=60).json()["name"] == "mine"
        states = {row["name"]: row["state"] for row in httpx.post(f"{http}/v2/repository/index", timeout=60).json()}
        assert [name for name, state in states.items() if state == "READY"] == ["preprocessing", "simple"]
        assert httpx.get(f"{http}/v2/health/ready", timeout=60).status_code == 200
        _check_shared_memory(process.pid, addresses["HTTPService"])
    assert process.returncode == 0 and any("--backend-config has no effect" in line for line in lines)
    log = tmp_path / "log.txt"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ["--http-address=127.0.0.1", f"--http-port={taken.getsockname()[1]}", "--log-verbose=1", f"--log-file={log}"]
        command = [str(program), f"--model-repository={repository(1)}", *address, "--log-format=ISO8601", "--backend-config=x,y=z"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot be used" in done.stderr and "--backend-config has no effect" not in done.stderr
    assert re.search(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z D .*--backend-config has no effect", log.read_text())


def _check_shared_memory(server: int, address: str) -> None:
    """A region that one of the two frontends registers can be used through both: each of many connections is to one of them."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    assert sum(b"frontend_entry" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children) == 2
    key = f"/stoker_test_{uuid.uuid4().hex[:8]}"
    region = tshm.create_shared_memory_region("region", key, 128)
    tshm.set_shared_memory_region(region, [np.arange(32, dtype=np.int32)])
    http = thttp.InferenceServerClient(address)
    http.register_system_shared_memory("region", key, 128)
    inputs = [thttp.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
    for i, tensor in enumerate(inputs):
        tensor.set_shared_memory("region", 64, offset=64 * i)
    for _ in range(12):
        with contextlib.closing(thttp.InferenceServerClient(address)) as other:
            result = other.infer("simple", inputs).as_numpy("OUTPUT0")
            assert result.tolist() == [list(range(16, 48, 2))]
    http.unregister_system_shared_memory()
    for _ in range(12):
        with contextlib.closing(thttp.InferenceServerClient(address)) as other:
            assert other.get_system_shared_memory_status() == []
    http.close()
    tshm.destroy_shared_memory_region(region)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((), "--model-repository is missing"),
        (("--model-repository=a", "--model-repository=b"), "names 2 repositories. Name the repository of one engine."),
        (("--model-repository=a", "--load-model=x"), "--load-model requires --model-control-mode=explicit."),
        (("--model-control-mode=poll",), "it must be one of none, explicit"),
        (("--exit-on-error=maybe",), "--exit-on-error=maybe is refused: it must be true or false"),
        (("--http-port=99999",), "it must be a whole number from 0 to 65535"),
        (("--http-address=127.0.0.1", "--grpc-address=0.0.0.0"), "contradicts 127.0.0.1"),
        (("--grpc-use-ssl=true",), "Use HTTPS and gRPC with TLS: stoker serve REPOSITORY --tls-certificate"),
        (("--rate-limit=execution_count",), "Set max_queue_size in config.pbtxt."),
    ],
)
def test_options_are_checked_before_anything_is_read(args: tuple[str, ...], error: str, run: Run) -> None:
    status, _, err = run("tritonserver", *args)
    assert status == 2 and error in err and "Traceback" not in err


def test_a_job_on_several_hosts_requires_a_secret(run: Run, repository: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    status, _, err = run("tritonserver", f"--model-repository={repository(2)}")
    assert status == 2 and "nnodes=2 requires a shared secret, and STOKER_CLUSTER_TOKEN is not set" in err


def test_an_unknown_model_and_option(run: Run, repository: Callable[[int], Path]) -> None:
    explicit = (f"--model-repository={repository(1)}", "--model-control-mode=explicit")
    status, _, err = run("tritonserver", *explicit, "--load-model=nope")
    assert status == 2 and "--load-model=nope: the repository has no such model. Use one of: ensemble" in err
    status, _, err = run("tritonserver", "--http-prot=1")
    assert status == 2 and "--http-port" in err
