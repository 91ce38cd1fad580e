"""`stoker serve`: an engine behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stoker.base import env, logging
from stoker.base.config import RuntimeConfig
from stoker.cli.options import fields, lines_of, runtime_options
from stoker.server.schemas.settings import ServerSettings

SERVER = {
    "host": "Address to listen on; 0.0.0.0 to be reachable from other machines.",
    "http_port": "0: any free port.",
    "grpc_port": "KServe over gRPC, Triton's is 8001; 0: any free port. Default: closed.",
    "metrics_port": "Metrics on a port of their own too, Triton's is 8002. Default: on the HTTP port only.",
    "model_name": "The name that clients use. Default: the folder's.",
    "protocols": "Open this protocol only: openai, kserve. May be repeated. Default: all.",
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
    "tool_parser": "How the model writes tool calls: llama3, hermes, mistral. Default: tools are refused.",
    "reasoning_parser": "How the model marks its reasoning: qwen3, deepseek_r1. Default: it stays in the text.",
}


@runtime_options
@fields(ServerSettings, "settings", SERVER)
def serve(
    engine: Annotated[Path, typer.Argument(help="An engine directory, or a folder that deploys one, such as a Triton repository.")],
    api_keys: Annotated[Path | None, typer.Option(help="A file of keys, one a line; clients must send one as a bearer token.")] = None,
    *,
    settings: ServerSettings,
    runtime: RuntimeConfig,
) -> None:
    """Serve an engine over HTTP: OpenAI and Triton (KServe v2) on one port, Prometheus metrics at /metrics.

    Ctrl-C or SIGTERM lets requests in flight end, then stops; a second one stops at once.

    Examples:

      stoker serve engine

      stoker serve engine --host 0.0.0.0 --port 8080 --api-keys keys.txt --kv-cache-fraction 0.8
    """
    from stoker.cli.deployed import deployed
    from stoker.server.process import serve as run

    if not env.text("STOKER_LOG"):
        logging.configure("INFO")
    found = deployed(engine, settings, runtime)  # a bad engine is told here, in one line, before any process starts
    settings = found.settings
    if api_keys is not None:
        settings = msgspec.structs.replace(settings, api_keys=tuple(lines_of(api_keys, "key")))
    raise typer.Exit(run(found.engine, found.runtime, settings, typer.echo, tokenizer=found.tokenizer, devices=found.devices))
