"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, with ports and folders of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from free_ports import free_port

NO_SLURM = "needs root, and slurmctld, slurmd and munged (Debian packages slurm-wlm and munge)"
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
KillWait=40
SlurmctldPidFile={dir}/ctl.pid
SlurmdPidFile={dir}/%n.pid
SlurmctldLogFile={dir}/ctl.log
SlurmdLogFile={dir}/%n.log
MpiDefault=none
NodeName=d0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=d1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=p Nodes=d0,d1 Default=YES State=UP
"""


def can_run_slurm() -> bool:
    return not os.geteuid() and all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch"))


class Slurm:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "OMPI_")) and name != "SLURM_CONF"]:
            del self.environment[name]

    def run(self, *command: str, check: bool = True) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job, "-o").partition("JobState=")[2].partition(" ")[0]

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, and stop them at the end."""
    ports = [free_port("") for _ in range(3)]
    for name in ("state", "d0", "d1"):
        (folder / name).mkdir()
    conf = CONF.format(host=socket.gethostname().partition(".")[0], dir=folder, ports=ports, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(128))
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files.values()],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", "d0"], ["slurmd", "-D", "-N", "d1"],
    ]  # fmt: skip
    slurm = Slurm(folder)
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as output:
        try:
            for command in commands:
                processes.append(subprocess.Popen(command, env=slurm.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL))
                if command[0] == "munged":
                    _wait(lambda: (folder / "munge.sock").exists(), slurm)
            _wait(lambda: slurm.run("sinfo", "-h", "-o", "%D %t", check=False) == "2 idle", slurm)
            yield slurm
            slurm.run("scancel", "--user=root", check=False)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def _wait(condition: object, slurm: Slurm) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.1)
