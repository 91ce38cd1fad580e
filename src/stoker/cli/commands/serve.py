"""`stoker serve`: serves an engine, a checkpoint or a deployment folder over HTTP and gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings
from stoker.cli.api_keys import collect_keys, read_admin_key
from stoker.cli.config_file import read_config_file
from stoker.cli.log_options import LogFile, LogFormat, LogLevel, logging_to, use_default_level
from stoker.cli.node_options import NodeOptions, node_options, read_nodes
from stoker.cli.options import build_options, explicit_parameters, runtime_options, struct_options
from stoker.cli.ray_options import RayOptions, check_ray_options, ray_application, ray_options, run_on_ray
from stoker.cli.serve_arguments import ServeArguments
from stoker.deploy.build_settings import BuildSettings
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.settings import ServerSettings
from stoker.server.tenants.key_file import read_key_file

if TYPE_CHECKING:
    from stoker.cli.server_start import ServerStart
    from stoker.ray.settings import ApplicationSettings

log = get_logger(__name__)

# Field of ServerSettings: help text of its option.
SERVER_HELP = {
    "host": "Address to listen on; 0.0.0.0 accepts connections from other machines.",
    "http_port": "HTTP port; 0 chooses a free port.",
    "grpc_port": "Port for KServe over gRPC (Triton uses 8001); 0 chooses a free port. Default: no gRPC.",
    "metrics_port": "A separate port for metrics (Triton uses 8002). Default: metrics on the HTTP port only.",
    "model_name": "The model name that clients use. Default: the folder's name.",
    "protocols": "Serve only this protocol: openai, anthropic, ollama, kserve, sagemaker, truss or console. Repeatable. "
    "Default: those of the deployment folder.",
    "console": "Serve the web console at /. Default: yes, unless --protocol or the deployment folder names protocols.",
    "add_special_tokens": "Add the tokenizer's special tokens in front of text prompts.",
    "skip_special_tokens": "Leave special tokens out of the output text.",
    "default_max_tokens": "Number of new tokens for requests that set none. Default: the protocol's own.",
    "request_timeout_s": "Deadline in seconds for requests that set none.",
    "load_timeout_s": "Maximum number of seconds for loading the model.",
    "num_frontends": "Number of processes that parse requests, tokenize and stream.",
    "max_request_bytes": "Maximum size of a request; larger ones are rejected with status 413.",
    "drain_timeout_s": "Seconds that requests in flight may take after a stop signal.",
    "metric_names": "Export metrics under the names of this system: stoker, triton or vllm. Repeatable.",
    "otlp_endpoint": "Export OpenTelemetry traces to this collector over HTTP, such as http://localhost:4318. Needs stoker[otel].",
    "trace_sampling": "Fraction of the requests that are traced. A request with a traceparent is traced if its client traces it.",
    "log_requests": "Log a line per request: none, line, or contents, which adds prompts and answers.",
    "state_dir": "Directory for stored responses, files and batches. Default: a temporary one, which is deleted when the server stops.",
    "max_stored_bytes": "Maximum size of stored responses, whose oldest ones are then deleted, and of files, which are then rejected.",
    "exit_on_error": "End the server if its executor cannot start. Otherwise it stays and answers with status 503.",
    "restarts": "Number of times in a row that a failed executor, or the only frontend, is started again. A minute without a failure "
    "resets the count. 0: the server ends.",
    "retry_unstarted": "With --restarts: run the requests of a failed executor once more if nothing was sent to their clients.",
    "shared_memory": "Shared memory that KServe clients may register: a pattern of keys such as /input_*, or cuda:0. Repeatable.",
    "test_models": "Also serve the models of tritonclient's examples: simple, simple_identity, mock_llm and others.",
    "usage_log": "With named keys: a file to which a line of JSON with the tokens of each request is appended, for billing.",
    "cors_origins": "Allow web pages of this origin to send requests; * allows all. Repeatable.",
    "tls_certificate": "A PEM file. With --tls-key, the server uses HTTPS.",
    "tls_key": "A PEM file with the private key of --tls-certificate.",
    "tool_parser": f"Format of the model's tool calls: auto (by the chat template) or one of {', '.join(TOOL_PARSERS)}.",
    "reasoning_parser": f"Format of the model's reasoning: auto or one of {', '.join(REASONING_PARSERS)}. Default: it stays in the text.",
}


@build_options
@runtime_options
@node_options
@ray_options
@struct_options(ServerSettings, "settings", SERVER_HELP)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="An engine, a checkpoint folder, a .gguf file, a Triton, LMI or Truss folder, a hub id, an archive or an address. "
            "Default: /opt/ml/model, where SageMaker puts a container's model."
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="A file of API keys, one of which clients must send as bearer token: one a line, or, in a .yaml file, with names, limits "
            "and priorities. It is read again on SIGHUP."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="An API key; repeatable. Other users of this machine can see it in the list of processes: prefer --api-keys, or the "
            "variable STOKER_API_KEY, which holds one key."
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with the key of the routes of /debug. Default: STOKER_ADMIN_KEY; without a key they are closed."),
    ] = None,
    stop_at_eof: Annotated[
        bool, typer.Option("--stop-at-eof", help="Stop when standard input ends, as it does when the process that started the server ends.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=read_config_file,
            help="A YAML file of options, such as port: 8000, and model. Options on the command line take precedence.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print each setting and where it was read from, and do not serve.")] = False,
    log_level: LogLevel = None,
    log_file: LogFile = None,
    log_format: LogFormat = None,
    *,
    settings: ServerSettings,
    runtime: RuntimeConfig,
    build: BuildSettings,
    node_options: NodeOptions,
    ray_options: RayOptions,
) -> None:
    """Serve a model over HTTP: the OpenAI, Triton (KServe v2) and SageMaker protocols on one port, Prometheus metrics at /metrics.

    For a checkpoint, an engine is built first and cached. Options on the command line override the settings of a deployment folder.

    Ctrl-C or SIGTERM stops the server after the requests in flight. A second one stops it at once.

    With --ray, replicas of the engine are started on a Ray cluster, behind Ray Serve.

    With --nnodes, the ranks of the engine run on several hosts, on each of which this command runs.

    Examples:

      stoker serve engine --port 8000

      stoker serve engine --host 0.0.0.0 --api-keys keys.txt --kv-cache-fraction 0.8

      stoker serve meta-llama/Llama-3.1-8B-Instruct --quantize FP8 --max-total-len 8192

      stoker serve --config server.yaml --port 8080

      stoker serve my-truss --dry-run

      stoker serve engine --nnodes 2 --node-rank 1 --rendezvous gpu01:29400

      stoker serve engine --ray --ray-max-replicas 4
    """
    default_level = "warning" if dry_run and not env.text("STOKER_LOG") else None
    check_ray_options(ray_options)
    with logging_to(log_file, log_level or default_level, log_format):
        origins = explicit_parameters(context)
        if ray_options.ray:
            application = ray_application(context, ray_options, settings, origins)
            if dry_run:
                return _print_application(application)
            raise typer.Exit(run_on_ray(application, ray_options, settings, typer.echo))
        file = None if api_keys is None else str(api_keys)
        settings = msgspec.structs.replace(settings, api_keys=collect_keys(api_key or []), api_keys_file=file)
        if file is not None:
            origins["api_keys_file"] = origins.pop("api_keys")
            read_key_file(file, counts_quotas=settings.usage_log is not None)  # an invalid file is reported before anything is loaded
        settings = msgspec.structs.replace(settings, admin_key=read_admin_key(admin_key_file))
        origins.pop("admin_key_file", None)
        if settings.admin_key is not None:
            origins["admin_key"] = "a file or the environment"
        if settings.api_keys:
            origins["api_keys"] = "command line or the environment"
        arguments = ServeArguments(model, settings, runtime, build, origins, read_nodes(node_options))
        if dry_run:
            return _print_report(arguments)
        if stop_at_eof:
            from stoker.server.processes.child import end_at_eof

            end_at_eof()
        raise typer.Exit(_serve(arguments) if arguments.nodes.is_first else _run_node(arguments))


def _print_application(application: ApplicationSettings) -> None:
    """Print the configuration file of Ray Serve, after a check of what can be checked on this machine."""
    from stoker.ray.export import serve_config
    from stoker.ray.placement import place_replica

    for engine in application.engines:
        place_replica(engine)
    typer.echo(serve_config(application), nl=False)


def _print_report(arguments: ServeArguments) -> None:
    """Print the report of --dry-run."""
    from stoker.cli.output.deployment_report import deployment_report
    from stoker.cli.prepare_server import check_engine, describe_nodes

    deployment = arguments.read_deployment()
    check_engine(deployment, arguments.nodes)
    lines = deployment_report(deployment, arguments.origins)
    if arguments.nodes.num_nodes > 1:
        lines += ["", "nodes", *(f"  {line}" for line in describe_nodes(deployment, arguments.nodes))]
    typer.echo("\n".join(lines))


def _serve(arguments: ServeArguments) -> int:
    """Prepare the engine with progress messages, and serve it. Returns the exit status."""
    from stoker.api.progress import shown_progress

    with shown_progress("preparing", log.info) as progress:
        from stoker.cli.server_start import prepare

        start = prepare(arguments, progress)
    return _run(start, arguments.nodes)


def _run_node(arguments: ServeArguments) -> int:
    """Run the ranks of a node other than node 0 until node 0 ends. Returns the exit status. The ports are not opened."""
    from stoker.api.progress import shown_progress

    with shown_progress("preparing", log.info) as progress:
        from stoker.cli.node_process import run_node
        from stoker.cli.prepare_server import prepare_server

        deployment = arguments.read_deployment(progress)
        use_default_level(deployment.log_level)
        prepared = prepare_server(deployment, progress, arguments.nodes)
    return run_node(prepared.engine, prepared.runtime, arguments.nodes, typer.echo)


def _run(start: ServerStart, nodes: NodeSettings) -> int:
    """Serve a prepared engine until it is stopped, and print a line when it is ready. Returns the exit status."""
    from stoker.api.progress import Waiting
    from stoker.server.processes.supervisor import serve as run_server

    waiting, server = Waiting("loading"), start.server

    def announce(line: str) -> None:
        """Print the line that the server is ready."""
        waiting.stop()
        typer.echo(line)

    try:
        return run_server(
            server.engine, server.runtime, server.settings, announce, tokenizer=server.tokenizer, listeners=start.listeners,
            prestarted=start.executor, nodes=nodes, times=start.times,
        )  # fmt: skip
    finally:
        waiting.stop()
        if start.executor is not None:
            start.executor.close()
