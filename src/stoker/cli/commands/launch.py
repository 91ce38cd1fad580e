"""`stoker launch`: serves a Triton repository on Triton's ports, with the options of tensorrtllm_backend's launch_triton_server.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.server.protocols.kserve.model_config import TRITON, TritonOptions
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.cli.prepare_server import PreparedServer

_NO_EFFECT = "An option of launch_triton_server.py without effect: "


def launch(
    model_repo: Annotated[Path, typer.Option("--model_repo", "--model-repo", help="The model repository.")],
    world_size: Annotated[int | None, typer.Option("--world_size", "--world-size", help="Number of ranks; must be the engine's.")] = None,
    http_port: Annotated[int, typer.Option("--http_port", "--http-port", help="HTTP port; 0 chooses a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port", "--grpc-port", help="gRPC port; 0 chooses a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics_port", "--metrics-port", help="Metrics port; 0 chooses a free port.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    force: Annotated[bool, typer.Option("--force", "-f", help="Launch even when a tritonserver process is running.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Write a verbose log to --log-file.")] = False,
    log_file: Annotated[Path, typer.Option("--log-file", help="The file that --log writes.")] = Path("triton_log.txt"),
    exit_timeout: Annotated[
        int | None,
        typer.Option("--exit_timeout", "--exit-timeout", help="Seconds that requests in flight may take at the end. Default: 30."),
    ] = None,
    multi_model: Annotated[bool, typer.Option("--multi-model", help=f"{_NO_EFFECT}one repository has one engine.")] = False,
    no_mpi: Annotated[bool, typer.Option("--no-mpi", help=f"{_NO_EFFECT}Stoker starts ranks without MPI.")] = False,
    oversubscribe: Annotated[bool, typer.Option("--oversubscribe", help=f"{_NO_EFFECT}Stoker starts ranks without MPI.")] = False,
    disable_spawn_processes: Annotated[
        bool, typer.Option("--disable-spawn-processes", help=f"{_NO_EFFECT}it is for --multi-model.")
    ] = False,
    trtllm_llmapi_launch: Annotated[
        bool, typer.Option("--trtllm_llmapi_launch", help=f"{_NO_EFFECT}there is no LLM API to launch.")
    ] = False,
    multimodal_gpu0_cuda_mem_pool_bytes: Annotated[
        int, typer.Option("--multimodal_gpu0_cuda_mem_pool_bytes", help="Must be 0: Stoker serves text models only.")
    ] = 0,
    tensorrt_llm_model_name: Annotated[
        str | None, typer.Option("--tensorrt_llm_model_name", help="Name of the engine's model; must be the repository's.")
    ] = None,
    tritonserver: Annotated[
        Path | None, typer.Option("--tritonserver", help="Run this tritonserver program on the repository instead of Stoker's server.")
    ] = None,
    shared_memory: Annotated[
        list[str] | None,
        typer.Option(help="Shared memory that clients may register: a pattern of keys such as /input_*, or cuda:0. Repeatable."),
    ] = None,
    with_test_models: Annotated[bool, typer.Option("--with-test-models", help="Also serve the models of tritonclient's examples.")] = False,
    model_control: Annotated[str, typer.Option(help="none, or explicit: clients may load and unload models.")] = "none",
    console: Annotated[bool, typer.Option("--console/--no-console", help="Serve the web console at /.")] = False,
) -> None:
    """Serve a Triton model repository in the foreground. Ctrl-C or SIGTERM stops the server.

    Examples:

      stoker launch --model_repo repo

      stoker launch --model_repo repo --world_size 2 --grpc_port 9001 --log --log-file server.log
    """
    from stoker.cli.log_options import logging_to
    from stoker.cli.repository_server import (
        check_no_tritonserver,
        check_world_size,
        prepare_repository,
        serve_repository,
        with_options,
    )

    if multimodal_gpu0_cuda_mem_pool_bytes:
        name = f"--multimodal_gpu0_cuda_mem_pool_bytes {multimodal_gpu0_cuda_mem_pool_bytes}"
        raise ConfigError(f"{name} is refused: Stoker serves text models only.", cure="Leave it out.")
    addresses = ServerSettings(host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    prepared, options = prepare_repository(model_repo)
    check_world_size("--world_size", world_size, prepared)
    _check_model_name(tensorrt_llm_model_name, options)
    if not force:
        check_no_tritonserver()
    if tritonserver is not None:
        _execute_tritonserver(tritonserver, model_repo, addresses, log_file if log else None)
    changes = {
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "shared_memory": tuple(shared_memory or ()),
        "test_models": with_test_models,
        "console": console,
        **({} if exit_timeout is None else {"drain_timeout_s": exit_timeout}),
    }

    def complete(server: PreparedServer) -> ServerSettings:
        return with_options(msgspec.structs.replace(server.settings, **changes), model_control=model_control, server_name=TRITON)

    with logging_to(log_file if log else None, "DEBUG" if log else None):
        raise typer.Exit(serve_repository(model_repo, prepared, typer.echo, complete))


def _check_model_name(requested: str | None, options: TritonOptions) -> None:
    model = options.of_kind("tensorrt_llm")
    names = {name for name in (requested or "").split(",") if name}
    if model is not None and names - {model.name}:
        raise ConfigError(f"--tensorrt_llm_model_name {requested}: the repository's model is {model.name}.", cure=f"Use {model.name}.")


def _execute_tritonserver(program: Path, repository: Path, addresses: ServerSettings, log_file: Path | None) -> None:
    """Replace this process by a real tritonserver. The repository's Python models then start Stoker's executor themselves."""
    command = [
        str(program), f"--model-repository={repository}", f"--http-address={addresses.host}", f"--grpc-address={addresses.host}",
        f"--http-port={addresses.http_port}", f"--grpc-port={addresses.grpc_port}", f"--metrics-port={addresses.metrics_port}",
        "--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=prefix0_",
        *([] if log_file is None else ["--log-verbose=3", f"--log-file={log_file}"]),
    ]  # fmt: skip
    os.execve(command[0], command, env.child_environment())
