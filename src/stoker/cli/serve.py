"""`stoker serve`: a model behind HTTP, whatever its folder is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base import env, logging
from stoker.base.config import RuntimeConfig
from stoker.cli.options import fields, given, lines_of, runtime_options
from stoker.server.schemas.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.cli.deployed import Deployed
    from stoker.deploy.resolve import Progress

log = logging.get_logger(__name__)

SERVER = {
    "host": "Address to listen on; 0.0.0.0 to be reachable from other machines.",
    "http_port": "0: any free port.",
    "grpc_port": "KServe over gRPC, Triton's is 8001; 0: any free port. Default: closed.",
    "metrics_port": "Metrics on a port of their own too, Triton's is 8002. Default: on the HTTP port only.",
    "model_name": "The name that clients use. Default: the folder's.",
    "protocols": "Open this protocol only: openai, kserve, sagemaker, truss. May be repeated. Default: what the folder says.",
    "add_special_tokens": "The tokenizer's own prefix before prompts that are text.",
    "skip_special_tokens": "Special tokens make no text.",
    "default_max_tokens": "For requests that name none. Default: the protocol's own.",
    "request_timeout_s": "Deadline of requests that name none.",
    "load_timeout_s": "Loading may take so long.",
    "num_frontends": "Processes that parse, tokenize and stream.",
    "max_request_bytes": "Longer requests get 413.",
    "drain_timeout_s": "Requests in flight may take so long when told to stop.",
    "cors_origins": "Web pages of this origin may call; * for all. May be repeated.",
    "tls_certificate": "A PEM file; with --tls-key, HTTPS instead of HTTP.",
    "tls_key": "A PEM file.",
    "tool_parser": "How the model writes tool calls: llama3, hermes, qwen, mistral. Default: tools are refused.",
    "reasoning_parser": "How the model marks its reasoning: qwen3, deepseek_r1. Default: it stays in the text.",
}


@runtime_options
@fields(ServerSettings, "settings", SERVER)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="An engine, a checkpoint, a .gguf file, or a folder that deploys one: Triton, LMI, Truss; or an address of one. "
            "Default: /opt/ml/model, as SageMaker starts a container."
        ),
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="A file of keys, one a line; clients must send one as a bearer token.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what was understood, and where from; serve nothing.")] = False,
    *,
    settings: ServerSettings,
    runtime: RuntimeConfig,
) -> None:
    """Serve a model over HTTP: OpenAI, Triton (KServe v2) and SageMaker on one port, Prometheus metrics at /metrics.

    A checkpoint is built first, once for this machine. Options win over what a folder says.

    Ctrl-C or SIGTERM lets requests in flight end, then stops; a second one stops at once.

    Examples:

      stoker serve engine

      stoker serve engine --host 0.0.0.0 --port 8080 --api-keys keys.txt --kv-cache-fraction 0.8

      stoker serve my-truss --dry-run
    """
    if not env.text("STOKER_LOG"):
        logging.configure("WARNING" if dry_run else "INFO")
    if dry_run:
        return _dry_run(model, settings, runtime, given(context))
    if api_keys is not None:
        settings = msgspec.structs.replace(settings, api_keys=tuple(lines_of(api_keys, "key")))
    raise typer.Exit(_serve(model, settings, runtime, given(context)))


def _dry_run(model: str | None, settings: ServerSettings, runtime: RuntimeConfig, named: frozenset[str]) -> None:
    from stoker.cli.deployed import asked, check_engine
    from stoker.cli.understood import understood

    deployment = asked(model, settings, runtime, named)
    check_engine(deployment)
    typer.echo("\n".join(understood(deployment, named)))


def _serve(model: str | None, settings: ServerSettings, runtime: RuntimeConfig, named: frozenset[str]) -> int:
    from rich.console import Console

    from stoker.cli.progress import Bars, Lines

    console = Console(stderr=True)
    if not console.is_terminal:
        return _run(*_made(model, settings, runtime, named, Lines(log.info)))
    with Bars(console) as bars:
        ready = _made(model, settings, runtime, named, bars)
    return _run(*ready)


def _made(
    model: str | None, settings: ServerSettings, runtime: RuntimeConfig, named: frozenset[str], progress: Progress
) -> tuple[Deployed, list[socket.socket]]:
    """The engine, and the ports, which answer from now on: that the model is loading, while its engine is fetched and built."""
    from stoker.cli.deployed import asked, made, waits
    from stoker.server.process import listen

    deployment = asked(model, settings, runtime, named, progress)
    listeners = listen(deployment.server)
    if not waits(deployment):
        return made(deployment, progress), listeners
    from stoker.server.waiting import Waiting

    with Waiting(listeners, deployment.server, deployment.server.model_name or "model") as waiting:

        def both(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total)
            waiting.tell(stage, done, total)

        return made(deployment, both), listeners


def _run(found: Deployed, listeners: list[socket.socket]) -> int:
    from stoker.server.process import serve as run

    return run(found.engine, found.runtime, found.settings, typer.echo, tokenizer=found.tokenizer, listeners=listeners)
