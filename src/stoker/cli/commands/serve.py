"""`stoker serve`: serves an engine, a checkpoint or a deployment folder over HTTP and gRPC."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base import env, logging
from stoker.base.config import RuntimeConfig
from stoker.cli.options import explicit_parameters, read_lines, runtime_options, struct_options
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.cli.prepare_server import PreparedServer
    from stoker.deploy.prepare import Progress

log = logging.get_logger(__name__)

# Field of ServerSettings: help text of its option.
SERVER_HELP = {
    "host": "Address to listen on; 0.0.0.0 accepts connections from other machines.",
    "http_port": "HTTP port; 0 chooses a free port.",
    "grpc_port": "Port for KServe over gRPC (Triton uses 8001); 0 chooses a free port. Default: no gRPC.",
    "metrics_port": "A separate port for metrics (Triton uses 8002). Default: metrics on the HTTP port only.",
    "model_name": "The model name that clients use. Default: the folder's name.",
    "protocols": "Serve only this protocol: openai, kserve, sagemaker or truss. Repeatable. Default: those of the deployment folder.",
    "add_special_tokens": "Add the tokenizer's special tokens in front of text prompts.",
    "skip_special_tokens": "Leave special tokens out of the output text.",
    "default_max_tokens": "Number of new tokens for requests that set none. Default: the protocol's own.",
    "request_timeout_s": "Deadline in seconds for requests that set none.",
    "load_timeout_s": "Maximum number of seconds for loading the model.",
    "num_frontends": "Number of processes that parse requests, tokenize and stream.",
    "max_request_bytes": "Maximum size of a request; larger ones are rejected with status 413.",
    "drain_timeout_s": "Seconds that requests in flight may take after a stop signal.",
    "state_dir": "Directory for stored responses, files and batches. Default: a temporary one, which is deleted when the server stops.",
    "max_stored_bytes": "Maximum size of stored responses, whose oldest ones are then deleted, and of files, which are then rejected.",
    "cors_origins": "Allow web pages of this origin to send requests; * allows all. Repeatable.",
    "tls_certificate": "A PEM file. With --tls-key, the server uses HTTPS.",
    "tls_key": "A PEM file with the private key of --tls-certificate.",
    "tool_parser": f"Format of the model's tool calls: {', '.join(TOOL_PARSERS)}. Default: requests with tools are rejected.",
    "reasoning_parser": f"Format of the model's reasoning: {', '.join(REASONING_PARSERS)}. Default: reasoning stays in the text.",
}


@runtime_options
@struct_options(ServerSettings, "settings", SERVER_HELP)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="An engine, a checkpoint, a .gguf file, a Triton, LMI or Truss folder, or the address of one. "
            "Default: /opt/ml/model, where SageMaker puts a container's model."
        ),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file with one API key a line. Clients must send one of them as bearer token.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print each setting and where it was read from, and do not serve.")] = False,
    *,
    settings: ServerSettings,
    runtime: RuntimeConfig,
) -> None:
    """Serve a model over HTTP: the OpenAI, Triton (KServe v2) and SageMaker protocols on one port, Prometheus metrics at /metrics.

    For a checkpoint, an engine is built first and cached. Options on the command line override the settings of a deployment folder.

    Ctrl-C or SIGTERM stops the server after the requests in flight. A second one stops it at once.

    Examples:

      stoker serve engine --port 8000

      stoker serve engine --host 0.0.0.0 --api-keys keys.txt --kv-cache-fraction 0.8

      stoker serve my-truss --dry-run
    """
    if not env.text("STOKER_LOG"):
        logging.configure("WARNING" if dry_run else "INFO")
    explicit = explicit_parameters(context)
    if dry_run:
        return _print_report(model, settings, runtime, explicit)
    if api_keys is not None:
        settings = msgspec.structs.replace(settings, api_keys=tuple(read_lines(api_keys, "key")))
    raise typer.Exit(_serve(model, settings, runtime, explicit))


def _print_report(model: str | None, settings: ServerSettings, runtime: RuntimeConfig, explicit: frozenset[str]) -> None:
    from stoker.cli.output.deployment_report import deployment_report
    from stoker.cli.prepare_server import check_engine, read_deployment

    deployment = read_deployment(model, settings, runtime, explicit)
    check_engine(deployment)
    typer.echo("\n".join(deployment_report(deployment, explicit)))


def _serve(model: str | None, settings: ServerSettings, runtime: RuntimeConfig, explicit: frozenset[str]) -> int:
    from rich.console import Console

    from stoker.cli.output.progress import ProgressBars, ProgressLog

    console = Console(stderr=True)
    if not console.is_terminal:
        return _run(*_prepare(model, settings, runtime, explicit, ProgressLog(log.info)))
    with ProgressBars(console) as bars:
        prepared = _prepare(model, settings, runtime, explicit, bars)
    return _run(*prepared)


def _prepare(
    model: str | None, settings: ServerSettings, runtime: RuntimeConfig, explicit: frozenset[str], progress: Progress
) -> tuple[PreparedServer, list[socket.socket]]:
    """The engine and the listening sockets. While an engine is fetched or built, the ports answer that the model is loading."""
    from stoker.cli.prepare_server import engine_is_missing, prepare_server, read_deployment
    from stoker.server.processes.supervisor import listen

    deployment = read_deployment(model, settings, runtime, explicit, progress)
    listeners = listen(deployment.server)
    if not engine_is_missing(deployment):
        return prepare_server(deployment, progress), listeners
    from stoker.server.processes.loading import LoadingServer

    with LoadingServer(listeners, deployment.server, deployment.server.model_name or "model") as loading_server:

        def report(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total)
            loading_server.report_progress(stage, done, total)

        return prepare_server(deployment, report), listeners


def _run(prepared: PreparedServer, listeners: list[socket.socket]) -> int:
    from stoker.server.processes.supervisor import serve as run_server

    return run_server(
        prepared.engine, prepared.runtime, prepared.settings, typer.echo, tokenizer=prepared.tokenizer, listeners=listeners
    )  # fmt: skip
