"""`stoker launch`: a Triton repository on Triton's ports, with the flags of launch_triton_server.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stoker.base import env, logging
from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.server.schemas.settings import ServerSettings
from stoker.server.schemas.triton_models import TritonOptions


def launch(
    model_repo: Annotated[Path, typer.Option("--model_repo", "--model-repo", help="The repository.")],
    world_size: Annotated[int | None, typer.Option("--world_size", "--world-size", help="Ranks; they must be the engine's.")] = None,
    http_port: Annotated[int, typer.Option("--http_port", "--http-port", help="0: any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port", "--grpc-port", help="0: any free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics_port", "--metrics-port", help="0: any free port.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    force: Annotated[bool, typer.Option("--force", "-f", help="Launch although a tritonserver runs on this machine.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Write a verbose log to --log-file.")] = False,
    log_file: Annotated[Path, typer.Option("--log-file", help="Where --log writes.")] = Path("triton_log.txt"),
    tensorrt_llm_model_name: Annotated[
        str | None, typer.Option("--tensorrt_llm_model_name", help="The engine's model; it must be the repository's.")
    ] = None,
    tritonserver: Annotated[Path | None, typer.Option("--tritonserver", help="Run this tritonserver on the repository instead.")] = None,
    model_control: Annotated[str, typer.Option(help="none, or explicit: clients may load and unload models.")] = "none",
) -> None:
    """Serve a repository in the foreground; Ctrl-C or SIGTERM ends it.

    Examples:

      stoker launch --model_repo repo

      stoker launch --model_repo repo --world_size 2 --grpc_port 9001 --log --log-file server.log
    """
    from stoker.cli.deployed import asked as read
    from stoker.cli.deployed import engine_info, made
    from stoker.server.process import serve

    asked = ServerSettings(host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    deployment = read(model_repo, ServerSettings(), RuntimeConfig())
    if not isinstance(deployment.server.options, TritonOptions | None):
        raise ConfigError(f"{model_repo} is of the format {deployment.format}.", cure=f"Serve it: stoker serve {model_repo}.")
    found = made(deployment)
    settings = msgspec.structs.replace(found.settings, host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    assert isinstance(settings.options, TritonOptions)
    _check_world(world_size, engine_info(found.engine).mapping.world_size)
    _check_name(tensorrt_llm_model_name, settings.options)
    if not force:
        _check_no_other()
    if tritonserver is not None:
        _run_triton(tritonserver, model_repo, asked, log_file if log else None)
    settings = msgspec.structs.replace(settings, options=msgspec.structs.replace(settings.options, model_control=model_control))
    with _logged(log_file if log else None):
        raise typer.Exit(serve(found.engine, found.runtime, settings, typer.echo, tokenizer=found.tokenizer))


def _check_world(asked: int | None, ranks: int) -> None:
    if asked not in (None, ranks):
        raise ConfigError(
            f"--world_size {asked}: the engine has {ranks} rank{'s' if ranks > 1 else ''}.", cure=f"Use {ranks}, or build another engine."
        )


def _check_name(asked: str | None, options: TritonOptions) -> None:
    model = options.of_kind("tensorrt_llm")
    names = {name for name in (asked or "").split(",") if name}
    if model is not None and names - {model.name}:
        raise ConfigError(f"--tensorrt_llm_model_name {asked}: the repository's model is {model.name}.", cure=f"Use {model.name}.")


def _check_no_other() -> None:
    """As launch_triton_server.py: a server that was forgotten would keep the GPU's memory."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = path.read_text().strip()
        except OSError:  # it has ended
            continue
        if name == "tritonserver":
            raise ConfigError(f"tritonserver runs already, as process {path.parent.name}.", cure="Stop it, or launch with --force.")


def _run_triton(program: Path, repository: Path, asked: ServerSettings, log_file: Path | None) -> None:
    """Become the real server. Its Python models start Stoker's executor themselves."""
    command = [
        str(program), f"--model-repository={repository}", f"--http-address={asked.host}", f"--grpc-address={asked.host}",
        f"--http-port={asked.http_port}", f"--grpc-port={asked.grpc_port}", f"--metrics-port={asked.metrics_port}",
        "--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=prefix0_",
        *([] if log_file is None else ["--log-verbose=3", f"--log-file={log_file}"]),
    ]  # fmt: skip
    os.execve(command[0], command, env.child_environment())


@contextmanager
def _logged(file: Path | None) -> Iterator[None]:
    """With a file, this process and its children write their whole log there."""
    if file is None:
        if not env.text("STOKER_LOG"):
            logging.configure("INFO")
        yield
        return
    logging.configure("DEBUG")
    with file.open("ab") as target:
        kept = os.dup(2)
        os.dup2(target.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
