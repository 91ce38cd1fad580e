"""The only module that reads the process environment. `VARIABLES` lists every variable that Stoker uses."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stoker.base.cpus import num_cpus
from stoker.base.errors import ConfigError

MAX_THREADS = 4096


class Variable(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    default: str  # for documentation
    description: str


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("STOKER_LOG", "info", "Log level: debug, info, warning or error. Commands that print their own output use warning."),
        Variable("STOKER_LOG_FILE", "", "File to which the log is appended; without it, the log is written to standard error."),
        Variable("STOKER_LOG_FORMAT", "text", "Format of the log: text, iso8601 (with date and time zone) or json (an object per line)."),
        Variable("STOKER_CACHE", "XDG_CACHE_HOME/stoker", "Directory of built engines, compiled kernels and interrupted calibrations."),
        Variable("STOKER_THREADS", "OMP_NUM_THREADS", "CPU threads for computation."),
        Variable("STOKER_NATIVE", "1", "0 disables the C kernels for the CPU; PyTorch computes instead."),
        Variable("STOKER_API_KEY", "", "API key that servers require, and that Stoker's clients send. It is never printed."),
        Variable(
            "STOKER_CLUSTER_TOKEN",
            "",
            "Shared secret of the nodes of an engine, and of servers with KV transfers; 16 bytes or more. Never printed.",
        ),
        Variable("STOKER_RENDEZVOUS", "", "HOST:PORT at which node 0 of an engine on several nodes listens."),
        Variable("RAY_ADDRESS", "", "Address of the Ray cluster of `stoker serve --ray`, such as auto, for one on this machine."),
        Variable("STOKER_ADMIN_KEY", "", "Key of the routes for diagnosis, /debug. It is never printed."),
        Variable("STOKER_PYTHON", "this interpreter", "Python interpreter of the executor that a Triton or Truss server starts."),
        Variable("STOKER_COMMIT", "git describe", "Commit to record in benchmark results, on a machine without git."),
        Variable("HF_TOKEN", "", "Access token for the Hugging Face hub. It is never printed."),
        Variable("HUGGING_FACE_HUB_TOKEN", "", "The same; HF_TOKEN takes precedence."),
        Variable("XDG_CACHE_HOME", "~/.cache", "Parent of the cache directory."),
        Variable("TRITON_CACHE_DIR", "STOKER_CACHE/kernels", "Directory of the kernels that Triton compiled."),
        Variable(
            "OMP_NUM_THREADS",
            "number of usable CPUs, up to a container's quota",
            "CPU threads for computation; the first number of a list.",
        ),
        Variable("CC", "gcc", "C compiler of Triton's launchers, which are compiled ahead of time."),
        Variable(
            "OMPI_COMM_WORLD_RANK",
            "",
            "Set by Open MPI. `stoker tritonserver` serves in the process of rank 0; the others wait for its end.",
        ),
        Variable("OMPI_COMM_WORLD_SIZE", "", "Set by Open MPI: the number of processes, which must be 1 or the engine's number of ranks."),
        Variable("PMI_RANK", "", "The same as OMPI_COMM_WORLD_RANK; set by MPICH and Intel MPI."),
        Variable("PMI_SIZE", "", "The same as OMPI_COMM_WORLD_SIZE; set by MPICH and Intel MPI."),
        Variable("SLURM_PROCID", "", "The same as OMPI_COMM_WORLD_RANK; set by srun."),
        Variable("SLURM_NTASKS", "", "The same as OMPI_COMM_WORLD_SIZE; set by srun."),
        Variable("OMPI_COMM_WORLD_LOCAL_SIZE", "", "Set by Open MPI: the number of processes on this host."),
        Variable("OMPI_COMM_WORLD_LOCAL_RANK", "", "Set by Open MPI: the index of the process on its host, which selects its GPUs."),
        Variable("MPI_LOCALNRANKS", "", "The same as OMPI_COMM_WORLD_LOCAL_SIZE; set by MPICH and Intel MPI."),
        Variable("MPI_LOCALRANKID", "", "The same as OMPI_COMM_WORLD_LOCAL_RANK; set by MPICH and Intel MPI."),
        Variable("SLURM_NNODES", "", "Set by Slurm: the number of hosts of the job."),
        Variable("SLURM_LOCALID", "", "The same as OMPI_COMM_WORLD_LOCAL_RANK; set by srun."),
        Variable("SLURM_JOB_ID", "", "Set by Slurm. It selects the port of the rendezvous of `stoker tritonserver` on several hosts."),
        Variable("SLURM_JOB_NODELIST", "", "Set by Slurm: the hosts of the job, the first of which has the rendezvous."),
        Variable("SLURM_STEP_NODELIST", "", "The same for one srun; it takes precedence."),
        Variable("TRTLLM_ORCHESTRATOR", "", "1: one process starts all ranks, as Stoker always does on one host."),
        Variable("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "", "0 is rejected with TRTLLM_ORCHESTRATOR=1."),
        Variable("PROMETHEUS_MULTIPROC_DIR", "", "Set by Stoker for servers with several frontend processes: files of shared metrics."),
        Variable("NOTIFY_SOCKET", "", "Set by systemd for a unit with Type=notify: the socket that receives the state of a server."),
        Variable("WATCHDOG_USEC", "", "Set by systemd for a unit with WatchdogSec=: the microseconds within which a server reports."),
        Variable("WATCHDOG_PID", "", "Set by systemd: the process that reports to the watchdog."),
    )
}


def text(name: str, default: str = "") -> str:
    """The value of a variable in `VARIABLES`, or `default` when it is unset or empty."""
    return os.environ.get(VARIABLES[name].name) or default


def flag(name: str, default: bool = False) -> bool:
    """A boolean variable: 1, true, yes and on mean true, in any case. All other values mean false."""
    value = text(name)
    return default if not value else value.strip().lower() in ("1", "true", "yes", "on")


def cache_dir() -> Path:
    """The directory of built engines and compiled kernels: STOKER_CACHE, XDG_CACHE_HOME/stoker or ~/.cache/stoker."""
    if explicit := text("STOKER_CACHE"):
        return Path(explicit)
    return Path(text("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"


def kernel_cache() -> Path:
    """The directory of Triton's compiled kernels: TRITON_CACHE_DIR, or `kernels` in the cache directory."""
    return Path(text("TRITON_CACHE_DIR") or cache_dir() / "kernels")


def native() -> bool:
    """STOKER_NATIVE: whether the C kernels for the CPU are compiled and used."""
    return flag("STOKER_NATIVE", True)


def log_level() -> str:
    """The value of STOKER_LOG in upper case."""
    return text("STOKER_LOG", "info").upper()


def set_log(*, level: str | None = None, file: str | None = None, log_format: str | None = None) -> None:
    """Set STOKER_LOG, STOKER_LOG_FILE and STOKER_LOG_FORMAT for this process and its children. None leaves a variable unchanged."""
    for name, value in (("STOKER_LOG", level and level.lower()), ("STOKER_LOG_FILE", file), ("STOKER_LOG_FORMAT", log_format)):
        if value is not None:
            os.environ[name] = value


def set_keys(variables: dict[str, str]) -> None:
    """Set STOKER_API_KEY and STOKER_ADMIN_KEY for this process and its children. Those that are not in `variables` stay unchanged."""
    os.environ.update(variables)


def set_ray_variables(variables: dict[str, str]) -> None:
    """Set variables of Ray for the processes that this one starts. Those that the user set stay unchanged, except for HAProxy's program."""
    for name, value in variables.items():
        if name == "RAY_SERVE_HAPROXY_BINARY_PATH" or name not in os.environ:
            os.environ[name] = value


class JobProcess(msgspec.Struct, frozen=True):
    """The position of this process in an MPI or Slurm job: `rank` is 0 to `size` - 1; `variable` names the rank's variable."""

    rank: int = 0
    size: int = 1
    variable: str = ""
    num_hosts: int = 1
    local_rank: int = 0  # index among the processes of this host

    @property
    def one_host(self) -> bool:
        """Whether all processes are on one host."""
        return self.num_hosts == 1


def job_process() -> JobProcess:
    """The position of this process in an MPI or Slurm job; rank 0 of 1 outside of a job. Open MPI's variables precede Slurm's."""
    for variable, size_variable, local_variable, local_rank in _JOB_VARIABLES:
        rank, size = _whole(variable), _whole(size_variable)
        if rank is not None and size is not None:
            local = _whole(local_variable) or (1 if variable == "SLURM_PROCID" else size)
            num_hosts = local if variable == "SLURM_PROCID" else -(-size // local)
            return JobProcess(rank, size, variable, num_hosts, _whole(local_rank) or 0)
    return JobProcess()


# Rank, number of processes, number of processes on this host (of Slurm: of hosts), and rank among the processes of this host.
_JOB_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_LOCALID"),
)


def _whole(name: str) -> int | None:
    """The value of a variable as a number below 10⁹. None if it is something else."""
    value = text(name)
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def hub_token() -> str | None:
    """The access token for the Hugging Face hub: HF_TOKEN or HUGGING_FACE_HUB_TOKEN; None if neither is set."""
    return text("HF_TOKEN") or text("HUGGING_FACE_HUB_TOKEN") or None


def api_key() -> str | None:
    """The value of STOKER_API_KEY without white space around it. None if it is unset or empty."""
    return text("STOKER_API_KEY").strip() or None


def cluster_token() -> str:
    """The value of STOKER_CLUSTER_TOKEN without white space around it; empty if it is unset."""
    return text("STOKER_CLUSTER_TOKEN").strip()


def admin_key() -> str | None:
    """The value of STOKER_ADMIN_KEY without white space around it. None if it is unset or empty."""
    return text("STOKER_ADMIN_KEY").strip() or None


def commit() -> str | None:
    """The value of STOKER_COMMIT, or None."""
    return text("STOKER_COMMIT") or None


def num_threads() -> int:
    """The number of CPU threads for computation: STOKER_THREADS, OMP_NUM_THREADS, or the CPUs that this process may use (`num_cpus`).

    Raises ConfigError for a value that is not a number of threads.
    """
    for name in ("STOKER_THREADS", "OMP_NUM_THREADS"):
        if value := text(name):
            return _parse_threads(name, value)
    return num_cpus()


def _parse_threads(name: str, value: str) -> int:
    """The number of threads in the variable `name`. Raises ConfigError."""
    outermost = value.partition(",")[0].strip()  # OpenMP accepts a list with one number per nesting level
    if not (outermost.isascii() and outermost.isdigit() and len(outermost) < 5 and 0 < int(outermost) <= MAX_THREADS):
        raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use a whole number from 1 to {MAX_THREADS}, or unset it.")
    return int(outermost)


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of this process's environment with `extra` variables, for a child process, which does not report to systemd."""
    return {**{name: value for name, value in os.environ.items() if name not in _SYSTEMD}, **extra}


_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
