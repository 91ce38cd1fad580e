"""`stoker route`: routes requests to replicas by the prefixes that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stoker.base import env, logging
from stoker.base.errors import DependencyError
from stoker.cli.config_file import read_config_file
from stoker.cli.options import read_lines, struct_options
from stoker.router.core.settings import POLICIES, RoutingSettings
from stoker.router.settings import RouterSettings

# Field of RoutingSettings: help text of its option.
ROUTING_HELP = {
    "policy": f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}. prefix considers load, sessions and adapters, too.",
    "decode_cost": "Load of a request that generates, in prompt tokens: a replica with a cached prefix may have this much more load.",
    "session_bonus": "Prompt tokens by which the replica of a session is preferred.",
    "adapter_bonus": "Prompt tokens by which replicas are preferred that served the adapter of the request before.",
    "max_in_flight": "Requests of this router on one replica; further ones wait in fair order. Default: twice the replica's batch size.",
    "disaggregate_tokens": "Uncached prompt tokens from which on another replica computes a prompt, if replicas have --transfer; 0: never.",
    "max_prefill_load": "Load of a prefill replica in tokens, above which prompts are computed where the answer is generated.",
    "max_queue_size": "Requests that wait in the router; further ones are refused with status 429.",
    "queue_timeout_s": "Seconds after which a request that waits in the router is refused with status 503.",
    "unavailable_timeout_s": "Seconds that a request waits while no replica is available; 0: it is refused with status 503 at once.",
    "max_retries": "Further replicas that get a request if one fails before it has answered.",
    "max_failures": "Failures in a row after which a replica is paused.",
}
# Field of RouterSettings: help text of its option.
ROUTER_HELP = {
    "replicas_file": "A file with one URL a line, read again when it changes.",
    "host": "Address to listen on; 0.0.0.0 accepts connections from other machines.",
    "http_port": "HTTP port; 0 chooses a free port.",
    "grpc_port": "Port for KServe over gRPC; 0 chooses a free port. Default: no gRPC.",
    "tokenizer": "The engine of the replicas, or a folder with its tokenizer. Default: prefixes of text instead of tokens.",
    "session_header": "Header with the session of a request. Without it: prompt_cache_key, user or metadata.user_id of the body.",
    "tenant_header": "Header with the tenant of a request. Without it: the API key.",
    "max_request_bytes": "Maximum size of a request; larger ones are rejected with status 413.",
    "connect_timeout_s": "Seconds for connecting to a replica.",
    "health_interval_s": "Seconds between two health checks of a replica.",
    "health_timeout_s": "Seconds after which a health check has failed.",
    "tokenize_timeout_s": "Seconds after which a prompt is routed without its tokens.",
    "drain_timeout_s": "Seconds that requests in flight may take after a stop signal.",
    "access_log": "Log a line of JSON for each request.",
    "tls_certificate": "A PEM file. With --tls-key, the router uses HTTPS.",
    "tls_key": "A PEM file with the private key of --tls-certificate.",
}


@struct_options(RoutingSettings, "routing", ROUTING_HELP)
@struct_options(RouterSettings, "settings", ROUTER_HELP)
def route(
    replicas: Annotated[list[str] | None, typer.Argument(help="URLs of the replicas, such as http://10.0.0.5:8000.")] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file with one API key a line, which clients must send. Default: their keys are passed on.")
    ] = None,
    replica_key: Annotated[
        Path | None,
        typer.Option(help="A file with the API key of the replicas, for health checks and for clients with a key of --api-keys."),
    ] = None,
    admin_key: Annotated[
        Path | None,
        typer.Option(help="A file with the key for the routes under /router. Without it they are open on a loopback address, else closed."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(is_eager=True, callback=read_config_file, help="A YAML file of options. Options on the command line take precedence."),
    ] = None,
    *,
    settings: RouterSettings,
    routing: RoutingSettings,
) -> None:
    """Route requests of all protocols to several servers, which are started with `stoker serve --kv-events`.

    A request goes to the replica that holds the beginning of its prompt, unless that replica has too much load. Requests that have
    received nothing are repeated when their replica fails.

    Examples:

      stoker route http://10.0.0.5:8000 http://10.0.0.6:8000 --tokenizer engine

      stoker route --replicas-file replicas.txt --host 0.0.0.0 --port 80 --admin-key admin.key
    """
    if not env.text("STOKER_LOG"):
        logging.configure("INFO")
    chosen = msgspec.structs.replace(
        settings,
        replicas=tuple(replicas or ()),
        api_keys=tuple(dict.fromkeys(read_lines(api_keys, "key"))) if api_keys is not None else (),
        replica_api_key=_read_key(replica_key) or env.api_key(),
        admin_key=_read_key(admin_key),
        routing=routing,
    )
    try:
        from stoker.router.proxy.serve import serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise DependencyError("aiohttp", "stoker route", "route") from None
    raise typer.Exit(serve(chosen, typer.echo))


def _read_key(file: Path | None) -> str | None:
    """The first key in a file, or None without a file."""
    return read_lines(file, "key")[0] if file is not None else None
