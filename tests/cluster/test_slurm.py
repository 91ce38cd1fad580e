"""The scripts of `stoker export slurm` in a real Slurm: two nodes serve one engine, and requests in flight end normally after scancel."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
from free_ports import free_port
from slurm_cluster import NO_SLURM, Slurm, can_run_slurm, running_slurm

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.slurm.export import SlurmJob, export_slurm
from stoker.deploy.triton.export import export_triton

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

INFO = EngineInfo(
    path="/data/llama 70", architecture="LlamaForCausalLM", vocab_size=320, mapping=Mapping(tensor_parallel=4, pipeline_parallel=2)
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if not can_run_slurm():
        pytest.skip(NO_SLURM)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Job:
    """A submitted job, and the output of its tasks."""

    def __init__(self, slurm: Slurm, logs: Path, number: str) -> None:
        self.slurm, self.logs, self.number = slurm, logs, number

    def log(self, task: int) -> str:
        file = self.logs / f"{self.number}-{task}.out"
        return file.read_text() if file.exists() else ""

    def all_logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.logs.iterdir())) + self.slurm.logs()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 100) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.all_logs()
            time.sleep(0.05)

    def wait_for_log(self, task: int, text: str) -> None:
        self.wait_for(lambda: text in self.log(task) or self.slurm.state(self.number) == "FAILED")
        assert text in self.log(task), self.all_logs()


def post(url: str, body: dict[str, object]) -> HTTPResponse:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = urllib.request.urlopen(request, timeout=40)
    assert isinstance(answer, HTTPResponse)
    return answer


def test_a_job_serves_and_drains_on_scancel(slurm: Slurm, engine: Callable[[str], Path], tmp_path: Path) -> None:
    port, path = free_port(), engine("long")
    mapping = Mapping(pipeline_parallel=2)
    info = EngineInfo(path=str(path), architecture="LlamaForCausalLM", vocab_size=320, device="cpu", mapping=mapping)
    settings = SlurmJob(
        host="127.0.0.1", port=port, cpus_per_node=1, command=f"{sys.executable} -m stoker", drain_timeout_s=30,
        serve_options="--num-threads 1 --model-name tiny",
    )  # fmt: skip
    script, _ = export_slurm(info, tmp_path / "job", settings)
    job = Job(slurm, tmp_path / "job" / "logs", slurm.run("sbatch", "--parsable", str(script)))
    job.wait_for_log(0, "is served at")
    assert "2 ranks on 2 nodes: pipeline across nodes" in job.log(0) and "node 1 runs rank 0" in job.log(1), job.all_logs()
    events: list[tuple[float, str]] = []

    def stream() -> None:
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        lines = post(f"http://127.0.0.1:{port}/v1/completions", body)
        events.extend((time.monotonic(), line.decode().strip()) for line in lines if line.strip())

    reader = threading.Thread(target=stream, daemon=True)
    reader.start()
    job.wait_for(lambda: len(events) > 2)
    slurm.run("scancel", job.number)
    job.wait_for_log(1, "node 0 ends the engine, after the requests in flight")
    signalled = time.monotonic()
    reader.join(40)
    assert events[-1][0] > signalled and events[-1][1] == "data: [DONE]", job.all_logs()
    assert json.loads(events[-2][1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    job.wait_for(lambda: slurm.state(job.number) == "CANCELLED" and not slurm.run("squeue", "-h"))
    assert "Traceback" not in job.log(0) + job.log(1), job.all_logs()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_triton_repository_on_two_nodes(slurm: Slurm, engine: Callable[[str], Path], tmp_path: Path) -> None:
    """num_nodes and participant_ids of the configuration select the processes of the job: the third one holds no rank."""
    from stoker.cli.prepare_server import engine_info

    http, rendezvous = free_port(), free_port()
    export_triton(engine_info(engine("stages")), tmp_path / "repo", {"num_nodes": "2", "participant_ids": "0,2", "decoupled_mode": "false"})
    (tmp_path / "logs").mkdir()
    server = f"{sys.executable} -m stoker tritonserver --model-repository={tmp_path}/repo --http-address=127.0.0.1 --http-port={http}"
    script = tmp_path / "repo.sub"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks=3 --oversubscribe --overcommit\n"
        f"export STOKER_CLUSTER_TOKEN={'t' * 32} STOKER_RENDEZVOUS=127.0.0.1:{rendezvous} STOKER_THREADS=1\n"
        f"srun --mpi=none --overcommit --output={tmp_path}/logs/%j-%t.out {server} --grpc-port={free_port()} --metrics-port={free_port()}\n"
    )
    job = Job(slurm, tmp_path / "logs", slurm.run("sbatch", "--parsable", f"--output={tmp_path}/logs/%j.out", str(script)))
    job.wait_for_log(0, "is served at")
    answer = json.load(post(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", {"text_input": "the quick", "max_tokens": 5}))
    assert answer["model_name"] == "ensemble" and answer["text_output"], job.all_logs()
    assert "process 1 of 3 is not among the participant_ids, and ends" in job.log(1), job.all_logs()
    assert "node 1 runs rank 0" in job.log(2), job.all_logs()
    slurm.run("scancel", job.number)
    job.wait_for(lambda: not slurm.run("squeue", "-h"))


def test_the_scripts_have_the_options_of_the_job(tmp_path: Path) -> None:
    job = SlurmJob(
        partition="luna", account="research", time="1-00:00:00", job_name="llama", gpus_per_node="h100:4", port=9000,
        container_image="/images/stoker 1.sqsh", container_mounts="/data:/data", serve_options="--model-name 'llama 70'",
    )  # fmt: skip
    script, program = export_slurm(INFO, tmp_path / "job", job)
    text, run = script.read_text(), program.read_text()
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    folder = tmp_path / "job"
    assert directives == [
        "--job-name=llama", f"--output={folder}/logs/%j.out", f"--error={folder}/logs/%j.err", "--nodes=2", "--ntasks-per-node=1",
        "--cpus-per-task=20", "--gpus-per-node=h100:4", "--partition=luna", "--account=research", "--time=1-00:00:00",
    ]  # fmt: skip
    assert "--container-image='/images/stoker 1.sqsh' --container-mounts=/data:/data" in text and (folder / "logs").is_dir()
    assert "exec stoker serve '/data/llama 70'" in run and "--port 9000 --drain-timeout-s 20 --model-name 'llama 70'" in run
    for file in (script, program):
        subprocess.run(["bash", "-n", file], check=True)
    with pytest.raises(ConfigError, match=r"stoker\.sub exists"):
        export_slurm(INFO, folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 3}, "nnodes=3 is refused: the engine has 8 ranks"),
        ({"nodes": 0}, "nodes=0 is refused"),
        ({"partition": "a b"}, "partition='a b' is refused"),
        ({"time": "tomorrow"}, "time='tomorrow' is refused. Use MINUTES, MINUTES:SECONDS,"),
        ({"time": "1-"}, "time='1-' is refused"),
        ({"time": "1-2:3:4:5"}, "time='1-2:3:4:5' is refused"),
        ({"gpus_per_node": "abc"}, "gpus_per_node='abc' is refused. Use a number from 1 to 9999, or TYPE:NUMBER"),
        ({"gpus_per_node": "0"}, "gpus_per_node='0' is refused"),
        ({"gpus_per_node": "h100:4,"}, "gpus_per_node='h100:4,' is refused"),
        ({"gpus_per_node": "a100:1,h100:2"}, "gpus_per_node=a100:1,h100:2 is refused: 4 ranks of the engine run on each host."),
        ({"host": "a b"}, "host='a b' is refused. Use an address or a host name"),
        ({"host": "10.0.0.256"}, "host='10.0.0.256' is refused"),
        ({"time": "1\n#SBATCH --uid=0"}, "time='1\\n#SBATCH --uid=0' is refused"),
        ({"command": "stoker\nreboot"}, "command='stoker\\nreboot' is refused"),
        ({"serve_options": "--name 'a"}, "is refused: No closing quotation"),
        ({"container_mounts": "/a:/a"}, "container_mounts and container_workdir require an image"),
        ({"port": 0}, "port=0 is refused"),
    ],
)
def test_settings_are_checked_before_anything_is_written(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export_slurm(INFO, tmp_path / "job", SlurmJob(**settings))  # type: ignore[arg-type]
    assert message in str(caught.value) and not (tmp_path / "job").exists()


@pytest.mark.parametrize("field", ["time", "gpus_per_node", "host"])
def test_forms_that_slurm_and_the_server_accept(field: str) -> None:
    accepted = {
        "time": ("0", "90", "90:30", "8:00:00", "2-12", "2-12:30", "1-00:00:00"),
        "gpus_per_node": ("1", "4", "h100:4", "3g.40gb:2", "volta:3,kepler:5"),
        "host": ("0.0.0.0", "::", "fe80::1%eth0", "localhost", "gpu-01.cluster.example"),
    }
    for value in accepted[field]:
        assert getattr(SlurmJob(**{field: value}), field) == value  # type: ignore[arg-type]
