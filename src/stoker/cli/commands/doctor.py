"""`stoker doctor`: checks what this machine can run. Each function in `CHECKS` is one check and returns one Finding."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer

from stoker.base import env

HUB_TIMEOUT_S = 2.0
PORT = 8000
MIN_CAPABILITY = (8, 0)  # required for bfloat16 in Triton's dot products
FP8_CAPABILITY = (8, 9)
GIB = 2**30
BYTES_PER_PARAMETER = 8  # float32 weights, and the same again for the KV cache and the process

# Optional package: what uses it, and the extra of Stoker that installs it.
OPTIONAL_PACKAGES = {
    "grpc": ("the gRPC port", "grpc"),
    "xgrammar": ("guided decoding", "guided"),
    "boto3": ("s3:// sources", "s3"),
    "opentelemetry.sdk": ("traces", "otel"),
}
# Names of instruction sets, and the kernel's flags for them.
CPU_EXTENSIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "BF16": "avx512_bf16", "AMX": "amx_tile"}


class Finding(NamedTuple):
    """One line of the report. The state is "ok", "note" (something optional is missing) or "fail" (Stoker cannot run)."""

    state: Literal["ok", "note", "fail"]
    what: str
    says: str


def doctor(
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the model hub.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Report what this machine can run, and why not. The exit status is 1 when Stoker cannot run at all.

    Examples:

      stoker doctor

      stoker doctor --offline --json
    """
    from rich.console import Console

    with Console(stderr=True).status("checking"):
        findings = [check() for check in CHECKS]
        if not offline:
            findings.append(_check_hub())
    if as_json:
        typer.echo(msgspec.json.encode([finding._asdict() for finding in findings]))
    else:
        _print_table(findings)
    raise typer.Exit(int(any(finding.state == "fail" for finding in findings)))


def _print_table(findings: list[Finding]) -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    for finding in findings:
        table.add_row(f"[{colours[finding.state]}]{finding.state}[/]", escape(finding.what), escape(finding.says))
    Console().print(table)


def _check_python() -> Finding:
    """The version of Python and the platform."""
    return Finding("ok", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _check_torch() -> Finding:
    """The version of torch, or the reason why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation raises OSError and others, not only ImportError
        return Finding("fail", "torch", f"cannot be imported: {error}. Run: pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return Finding("ok", "torch", f"{torch.__version__}, {build}")


def _check_gpu() -> Finding:
    """The first GPU's name, compute capability and memory, or the reason why there is none."""
    torch = _import_or_none("torch")
    if torch is None:
        return Finding("note", "GPU", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("note", "GPU", f"none: {_why_no_gpu(torch)}. Engines run on the CPU.")
    count = torch.cuda.device_count()
    capability = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    says = (
        f"{count} × {torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}, "
        f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
    )
    if capability < MIN_CAPABILITY:
        return Finding("note", "GPU", f"{says}; the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer")
    return Finding("ok", "GPU", f"{says}; FP8 {'yes' if capability >= FP8_CAPABILITY else 'no: it needs 8.9'}")


def _why_no_gpu(torch: Any) -> str:
    """The reason why torch finds no GPU."""
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        return "no NVIDIA driver is installed"
    if torch.version.cuda is None:
        return "this torch is a CPU build; install one for CUDA"
    return "the driver is installed but torch sees no device; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _check_triton() -> Finding:
    """The version of Triton, or that it is missing."""
    try:
        return Finding("ok", "triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("note", "triton", "not installed: GPU kernels need it. Run: pip install 'stoker[gpu]'")


def _check_processor() -> Finding:
    """The name, cores and vector extensions of the processor."""
    from stoker.base.cpus import num_cpus
    from stoker.cli.benchmark.machine import cpu_flags, cpu_name

    flags = cpu_flags()
    extensions = [name for name, flag in CPU_EXTENSIONS.items() if flag in flags]
    says = f"{cpu_name()}, {num_cpus()} cores; {', '.join(extensions) or 'no known vector extensions'}"
    slow = "" if "BF16" in extensions or "AMX" in extensions else "; bfloat16 is slow here, build with --dtype float32"
    return Finding("ok", "processor", says + slow)


def _check_cpu_kernels() -> Finding:
    """Whether the CPU kernels in C are used. Compiles them unless they are cached."""
    if _import_or_none("torch") is None:
        return Finding("note", "CPU kernels", "unknown without torch")
    from stoker.kernels.native.library import kernels

    library = kernels()
    if isinstance(library, str):
        return Finding("note", "CPU kernels", f"PyTorch's, because those in C are not used: {library}")
    return Finding("ok", "CPU kernels", "in C, compiled for this processor")


def _check_memory() -> Finding:
    """The free and total main memory."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return Finding("note", "memory", "unknown on this system")
    parameters = free / BYTES_PER_PARAMETER / 1e9
    says = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free: models up to about {parameters:.1f} B parameters on the CPU"
    return Finding("ok", "memory", says)


def _check_cache() -> Finding:
    """The cache directory and the free space on its disk."""
    path = env.cache_dir()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding("note", "cache", f"{path}: {error.strerror}. Name another with STOKER_CACHE.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("note", "cache", f"{path} cannot be written. Name another with STOKER_CACHE.")
    return Finding("ok", "cache", f"{path}, {free / GIB:.0f} GiB free on its disk")


def _check_port() -> Finding:
    """Whether the default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError as error:
            return Finding("note", f"port {PORT}", f"{error.strerror}; serve with another --port")
    return Finding("ok", f"port {PORT}", "free")


def _package_check(name: str) -> Callable[[], Finding]:
    """The check of an optional package."""
    what, extra = OPTIONAL_PACKAGES[name]

    def check() -> Finding:
        """Whether the optional package is installed."""
        parent = name.partition(".")[0]  # find_spec raises an exception if it is not installed
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
            return Finding("note", name, f"not installed: {what} needs it. Run: pip install 'stoker[{extra}]'")
        return Finding("ok", name, f"installed: {what}")

    return check


def _check_hub() -> Finding:
    """Whether the model hub answers. Only hub ids need it, not engines, directories and GGUF files."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return Finding("note", "model hub", "HF_HUB_OFFLINE is set: build from a directory or a .gguf file")
    hub = urlsplit(ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        return Finding("note", "model hub", f"{hub.hostname} does not answer: build from a directory or a .gguf file")
    token = "with a token" if env.hub_token() else "without a token: set HF_TOKEN for gated models"
    return Finding("ok", "model hub", f"{hub.hostname} answers, {token}")


def _import_or_none(name: str) -> Any:
    """The module, or None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


CHECKS: tuple[Callable[[], Finding], ...] = (
    _check_python, _check_torch, _check_gpu, _check_triton, _check_processor, _check_cpu_kernels, _check_memory, _check_cache, _check_port,
    *map(_package_check, OPTIONAL_PACKAGES),
)  # fmt: skip
