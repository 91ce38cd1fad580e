"""The script pair of a Slurm job: `stoker.sub` for sbatch, and `stoker.sh`, which srun runs on each host."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from string import Template

import msgspec

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.base.nodes import MAX_NODES, is_host, ranks_per_node
from stoker.deploy.deployment import EngineInfo

FILES = ("stoker.sub", "stoker.sh")
_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:@%/+=-]+")  # values in #SBATCH lines, which have no quoting that all releases of Slurm read
# Values that sbatch would refuse, or read as something else. Field: (pattern, what it accepts).
_PATTERNS = {
    "time": (
        r"(\d{1,8}-)?\d{1,8}(:\d{1,8}){0,2}",
        "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS",
    ),
    "gpus_per_node": (r"{0}(,{0})*".format(r"([\w.-]+:)?0*[1-9]\d{0,3}"), "a number from 1 to 9999, or TYPE:NUMBER such as h100:4"),
}
CPUS_PER_RANK, CPUS_OF_SERVER = 4, 4


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a job. None: that of the cluster, or as described."""

    nodes: int | None = None
    """Hosts. None: one for each pipeline stage."""

    job_name: str = "stoker"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus_per_node: str | None = None
    """A number or TYPE:NUMBER, or several with commas. None: one GPU per rank."""

    cpus_per_node: int | None = None
    """CPUs of each host. None: CPUS_PER_RANK for each rank, and CPUS_OF_SERVER."""

    container_image: str | None = None
    container_mounts: str | None = None
    container_workdir: str | None = None
    command: str = "stoker"
    """The program on the hosts or in the container."""

    host: str = "0.0.0.0"
    port: int = 8000
    drain_timeout_s: int = 20
    """Seconds of requests in flight after scancel; less than Slurm's KillWait, which is 30 s by default."""

    serve_options: str = ""
    """Further options of stoker serve."""

    def __post_init__(self) -> None:
        if self.nodes is not None:
            check_range("nodes", self.nodes, 1, MAX_NODES)
        if self.cpus_per_node is not None:
            check_range("cpus_per_node", self.cpus_per_node, 1, 4096)
        check_range("port", self.port, 1, 65535)
        check_range("drain_timeout_s", self.drain_timeout_s, 0, 86400)
        for name in ("job_name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not _DIRECTIVE.fullmatch(value):
                raise ConfigError(f"{name}={value!r} is refused.", cure="Use letters, digits and the characters _ . , : @ % / + = -.")
        for name, (pattern, accepted) in _PATTERNS.items():
            value = getattr(self, name)
            if value is not None and re.fullmatch(pattern, value, re.ASCII) is None:
                raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use {accepted}.")
        if not is_host(self.host):
            raise ConfigError(f"host={self.host!r} is refused.", cure="Use an address or a host name, such as 0.0.0.0.")
        for name in ("container_image", "container_mounts", "container_workdir", "command", "serve_options"):
            value = getattr(self, name)
            if value is not None and not value.isprintable():
                raise ConfigError(f"{name}={value!r} is refused.", cure="Use printable characters, on one line.")
        try:
            shlex.split(self.serve_options)
        except ValueError as error:
            raise ConfigError(f"serve_options={self.serve_options!r} is refused: {error}.", cure="Close the quotation.") from None
        if self.container_image is None and (self.container_mounts or self.container_workdir):
            raise ConfigError("container_mounts and container_workdir require an image.", cure="Add --container-image, or leave them out.")


def export_slurm(engine: EngineInfo, folder: Path, job: SlurmJob = SlurmJob()) -> list[Path]:
    """Write the scripts into `folder`, and an empty folder `logs`. Returns the files.

    Raises ConfigError if a file exists, and if the ranks of the engine cannot be divided among the hosts or their GPUs.
    """
    folder = folder.resolve()
    nodes = job.nodes or engine.mapping.pipeline_parallel
    num_ranks = ranks_per_node(engine.mapping, nodes)
    if engine.device == "cuda" and job.gpus_per_node is not None and _num_gpus(job.gpus_per_node) < num_ranks:
        raise ConfigError(
            f"gpus_per_node={job.gpus_per_node} is refused: {num_ranks} ranks of the engine run on each host.",
            cure=f"Use {num_ranks} or more, or more nodes.",
        )
    if not _DIRECTIVE.fullmatch(str(folder)):
        raise ConfigError(f"the folder {str(folder)!r} is refused in #SBATCH lines.", cure="Use a path of letters, digits and _ . - /.")
    values = {
        "directives": "\n".join(f"#SBATCH {line}" for line in _directives(engine, folder, job, nodes, num_ranks)),
        "engine": shlex.quote(engine.path),
        "ranks": f"{engine.mapping.world_size} rank{'s' if engine.mapping.world_size > 1 else ''} on {_hosts(nodes)}",
        "folder": shlex.quote(str(folder)),
        "srun_options": " ".join(_srun_options(folder, job, num_ranks)),
        "nodes": _hosts(nodes),
        "command": " ".join(map(shlex.quote, shlex.split(job.command))),
        "host": shlex.quote(job.host),
        "port": str(job.port),
        "drain_timeout_s": str(job.drain_timeout_s),
        "serve_options": "".join(f" {shlex.quote(option)}" for option in shlex.split(job.serve_options)),
    }
    files = [folder / name for name in FILES]
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists.", cure="Remove it, or name another folder.")
    (folder / "logs").mkdir(parents=True, exist_ok=True)  # Slurm creates no folders for its output
    for file in files:
        template = resources.files("stoker.deploy.slurm").joinpath("templates", f"{file.name}.txt").read_text(encoding="utf-8")
        file.write_text(Template(template).substitute(values), encoding="utf-8")
        file.chmod(0o755)
    return files


def _num_gpus(text: str) -> int:
    """The GPUs of one host, of all types."""
    return sum(int(part.rpartition(":")[2]) for part in text.split(","))


def _hosts(count: int) -> str:
    """ "1 host", or "2 hosts"."""
    return f"{count} host{'s' if count > 1 else ''}"


def _directives(engine: EngineInfo, folder: Path, job: SlurmJob, nodes: int, num_ranks: int) -> list[str]:
    """The options of sbatch."""
    lines = [
        f"--job-name={job.job_name}", f"--output={folder}/logs/%j.out", f"--error={folder}/logs/%j.err", f"--nodes={nodes}",
        "--ntasks-per-node=1", f"--cpus-per-task={_num_cpus(job, num_ranks)}",
    ]  # fmt: skip
    if engine.device == "cuda" or job.gpus_per_node is not None:
        lines.append(f"--gpus-per-node={job.gpus_per_node or num_ranks}")
    named = {"partition": job.partition, "account": job.account, "time": job.time}
    return lines + [f"--{name}={value}" for name, value in named.items() if value is not None]


def _srun_options(folder: Path, job: SlurmJob, num_ranks: int) -> list[str]:
    """The options of srun. The processes use no MPI. If one of them fails, the others are ended."""
    options = ["--mpi=none", "--kill-on-bad-exit=1", f"--cpus-per-task={_num_cpus(job, num_ranks)}", f"--output={folder}/logs/%j-%t.out"]
    containers = {
        "container-image": job.container_image, "container-mounts": job.container_mounts, "container-workdir": job.container_workdir,
    }  # fmt: skip
    return [*options, *(f"--{name}={shlex.quote(value)}" for name, value in containers.items() if value is not None)]


def _num_cpus(job: SlurmJob, num_ranks: int) -> int:
    """The CPUs of one host."""
    return job.cpus_per_node or CPUS_PER_RANK * num_ranks + CPUS_OF_SERVER
