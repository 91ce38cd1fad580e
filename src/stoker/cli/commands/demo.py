"""`stoker demo`: builds the default model, serves it and sends it requests."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stoker.api.progress import ProgressBars
from stoker.base import env, logging
from stoker.base.config import Limits, RuntimeConfig, check_range
from stoker.base.errors import ConfigError
from stoker.cli import default_model
from stoker.cli.api_keys import collect_keys

LIMITS = Limits(max_batch_size=16, max_input_len=2048, max_output_len=1024, max_num_tokens=2048, tokens_per_block=16)
KV_CACHE_TOKENS = 16384
SERVE_PORT = 8000


def demo(
    serve: Annotated[bool, typer.Option("--serve", help="Leave the server running until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="The server's port. Default: 8000 with --serve, otherwise a free port.")] = 0,
    engine: Annotated[bool, typer.Option("--engine", help="Only build the engine, and print its directory.")] = False,
) -> None:
    """Fetch a small model, build its engine, serve it, send it requests, and print the answers and timings.

    With --serve the server keeps running, and a curl command for it is printed.

    Examples:

      stoker demo

      stoker demo --serve --port 8080

      stoker package lmi "$(stoker demo --engine)"
    """
    if engine and (serve or port):
        raise ConfigError("--engine only builds, and is refused together with --serve and --port.", cure="Leave out one of them.")
    check_range("port", port, 0, 65535)
    console = Console(stderr=engine)
    path = _build_engine(console)
    if engine:
        typer.echo(path)
    elif serve:
        _serve_until_stopped(path, port or SERVE_PORT)
    else:
        _serve_and_request(console, path, port)


def _build_engine(console: Console) -> Path:
    """The directory of the default model's engine, which is built unless it is cached."""
    started = time.perf_counter()
    with console.status(f"fetching {default_model.NAME}"):
        from stoker.builder.build import build_cached
        from stoker.builder.config import BuildConfig
        from stoker.runtime.aot import compile_kernels

        checkpoint = default_model.default_checkpoint()
    with ProgressBars(console) as bars:
        engine = build_cached(checkpoint, BuildConfig(limits=LIMITS), verify="files", progress=bars, kernels=compile_kernels)
    console.print(f"Engine of {default_model.NAME}: {engine.path} ({time.perf_counter() - started:.1f} s)", markup=False, soft_wrap=True)
    return engine.path


def _serve_and_request(console: Console, engine: Path, port: int) -> None:
    """Serve the engine in a child process, send the demo's requests, and stop the server."""
    from stoker.cli.demo_requests import run_demo_requests
    from stoker.cli.server_process import running_server

    options = ["--port", str(port), "--model-name", default_model.NAME, "--kv-cache-tokens", str(KV_CACHE_TOKENS)]
    with running_server(engine, options) as url:
        console.print(f"Serving at {url}\n")
        asyncio.run(run_demo_requests(console, url, default_model.NAME))
    console.print("The server has stopped.")


def _serve_until_stopped(engine: Path, port: int) -> None:
    """Serve the engine in this process until Ctrl-C."""
    from stoker.cli.demo_requests import QUESTION
    from stoker.server.processes.supervisor import serve
    from stoker.server.settings import ServerSettings

    def announce(line: str) -> None:
        """Print the server's ready line, and a curl command."""
        messages = [{"role": "user", "content": QUESTION}]
        body = json.dumps({"model": default_model.NAME, "messages": messages, "temperature": 0, "stream": True})
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        print(f"{line}\n\n  curl -N {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n\nCtrl-C stops it.", flush=True)

    if not env.text("STOKER_LOG"):
        logging.configure("INFO")
    settings = ServerSettings(http_port=port, model_name=default_model.NAME, api_keys=collect_keys([]))
    raise typer.Exit(serve(engine, RuntimeConfig(kv_cache_tokens=KV_CACHE_TOKENS), settings, announce))
