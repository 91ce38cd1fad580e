"""`stoker tritonserver`: serves a Triton repository with the command line of Triton's server program."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from stoker.base import env
from stoker.base.env import JobProcess
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings
from stoker.deploy.triton.server_options import SERVER_OPTIONS, ServerOption
from stoker.server.protocols.kserve.log_settings import LOG_FORMATS
from stoker.server.protocols.kserve.model_config import TRITON, TritonOptions
from stoker.server.protocols.kserve.test_models import NAMES
from stoker.server.protocols.kserve.tracing.settings import DEFAULTS, read_trace_config

if TYPE_CHECKING:
    from stoker.cli.prepare_server import PreparedServer
    from stoker.server.settings import ServerSettings

log = get_logger(__name__)

_SETTINGS = (
    "host",
    "http_port",
    "grpc_port",
    "metrics_port",
    "drain_timeout_s",
    "max_request_bytes",
    "exit_on_error",
    "shared_memory",
    "test_models",
    "console",
)
_NOTICE = {"no effect": "It has no effect: ", "rejected": "Other values than {} are rejected: "}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate the command with an option for each row of SERVER_OPTIONS.

    The command receives the options that are set, as texts by name.
    """
    names = {row.name.replace("-", "_"): row.name for row in SERVER_OPTIONS}

    def run(**arguments: Any) -> None:
        """Call the command with the options that are set."""
        command({names[name]: value for name, value in arguments.items() if value not in (None, [], False)})

    parameters = [_parameter(name, SERVER_OPTIONS[option]) for name, option in names.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(name: str, row: ServerOption) -> inspect.Parameter:
    """The option for a row as a parameter of the command function."""
    metavar = None if row.argument == "flag" else "VALUE"
    option = typer.Option(f"--{row.name}", help=_help(row), metavar=metavar, show_default=False)
    kind: Any = {"one": str | None, "many": list[str], "flag": bool}[row.argument]
    default: Any = {"one": None, "many": [], "flag": False}[row.argument]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _help(row: ServerOption) -> str:
    """The help text of a row."""
    if row.status == "accepted":
        return row.meaning
    harmless = ", ".join(str(value).lower() for value in row.harmless)
    notice = _NOTICE[row.status].format(harmless) if harmless or row.status == "no effect" else "It is rejected: "
    return f"{notice}{row.reason}."


@_options
def tritonserver(given: dict[str, Any]) -> None:
    """Serve a Triton model repository in the foreground. The options are those of Triton's own server program.

    `stoker-tritonserver` is the same command as a program of its own, for tools that accept the path of a tritonserver:
    `launch_triton_server.py --tritonserver $(which stoker-tritonserver)`. In a job of several processes (mpirun, srun) on one host,
    process 0 starts all ranks and serves, and the others wait for its end. On several hosts, each process runs a part of the ranks.

    Examples:

      stoker tritonserver --model-repository=repo

      stoker tritonserver --model-repository=repo --model-control-mode=explicit --load-model=ensemble

      stoker tritonserver --model-repository=repo --http-port=9000 --log-verbose=1 --log-file=triton.log
    """
    values = _parse(given)
    from stoker.cli.log_options import logging_to
    from stoker.cli.node_options import check_orchestrator

    process = env.job_process()
    check_orchestrator(process)
    with logging_to(Path(values["log_file"]) if "log_file" in values else None, _log_level(values), _log_format(values)):
        for name, reason in values["notes"]:
            log.debug("--%s has no effect: %s", name, reason)
        raise typer.Exit(_run(values, process))


def _run(values: dict[str, Any], process: JobProcess) -> int:
    """Serve in process 0 of a job. In the others, run ranks if the job is on several hosts, else wait. Returns the exit status."""
    from stoker.cli.job_ranks import wait_for_first_rank
    from stoker.cli.node_options import check_required_nodes, job_nodes
    from stoker.cli.node_process import run_node
    from stoker.cli.repository_server import prepare_repository, read_repository

    repository = _repository(values)
    if process.one_host and process.rank > 0:
        wait_for_first_rank(process)
        return 0
    required = read_repository(repository).nodes
    nodes: NodeSettings | None = NodeSettings()
    if not process.one_host:
        check_required_nodes(required, NodeSettings(num_hosts=process.num_hosts), job=process)
        nodes = job_nodes(process, required)
    if nodes is None:
        log.info("process %d of %d is not among the participant_ids, and ends.", process.rank, process.size)
        return 0
    if nodes.is_first:
        return _serve(values, process.size if process.one_host else 1, nodes)
    prepared, _ = prepare_repository(repository, nodes)
    return run_node(prepared.engine, prepared.runtime, nodes, typer.echo)


def _serve(values: dict[str, Any], num_processes: int, nodes: NodeSettings) -> int:
    """Serve the repository with these values of options. Returns the exit status."""
    from stoker.cli.repository_server import check_world_size, prepare_repository, serve_repository, with_options

    if nodes.num_nodes > 1 and values.get("options.model_control") == "explicit":
        raise ConfigError(
            "--model-control-mode=explicit is refused for an engine on several nodes, which cannot be loaded again.", cure="Leave it out."
        )
    repository = _repository(values)
    prepared, options = prepare_repository(repository, nodes)
    check_world_size("the number of processes", num_processes if num_processes > 1 else None, prepared)
    changes = {"server_name": TRITON} | {
        name.removeprefix("options."): value for name, value in values.items() if name.startswith("options.")
    }
    load_models, fields = _load_models(values, options), _addresses(values)
    changes["trace"], collector = read_trace_config(values.get("trace_config", []))
    fields |= _tracing(changes["trace"], collector)

    def complete(server: PreparedServer) -> ServerSettings:
        """The settings read from the repository, with the options of the command line applied."""
        return with_options(msgspec.structs.replace(server.settings, **fields), **changes, load_models=load_models)

    return serve_repository(repository, prepared, typer.echo, complete, nodes)


def _parse(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the accepted options by target, and `notes`: (name, reason) of options without effect. Raises ConfigError."""
    values: dict[str, Any] = {"notes": []}
    for name, texts in given.items():
        row = SERVER_OPTIONS[name]
        try:
            checked = [row.parse(text) for text in (texts if isinstance(texts, list) else [str(texts)])]
        except InvalidValueError as error:
            raise error.config_error(f"--{name}") from None
        if row.status == "no effect":
            values["notes"].append((name, row.reason))
        elif row.status == "accepted":
            many = [*values.get(row.target, []), *checked] if row.argument == "many" else None
            _set(values, row, checked[-1] if many is None else many)
    if "load_models" in values and values.get("options.model_control") != "explicit":
        raise ConfigError("--load-model requires --model-control-mode=explicit.", cure="Add it, or leave --load-model out.")
    return values


def _set(values: dict[str, Any], row: ServerOption, value: Any) -> None:
    """Store the value of one option. Raises ConfigError if another option has set a different one."""
    if row.argument != "many" and values.get(row.target, value) != value:
        raise ConfigError(f"--{row.name}={value} contradicts {values[row.target]}, which another option sets.", cure="Make the two equal.")
    values[row.target] = value


def _repository(values: dict[str, Any]) -> Path:
    """The path of the repository. Raises ConfigError unless exactly one is named."""
    found = dict.fromkeys(values.get("repository", []))
    if len(found) != 1:
        text = f"--model-repository names {len(found)} repositories." if found else "--model-repository is missing."
        raise ConfigError(text, cure="Name the repository of one engine.")
    return Path(next(iter(found)))


def _addresses(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of ServerSettings for addresses and ports, which have Triton's defaults: all addresses."""
    fields: dict[str, Any] = {"host": "0.0.0.0", "http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    fields |= {name: values[name] for name in _SETTINGS if name in values}
    fields["shared_memory"] = tuple(fields.get("shared_memory", ()))
    closed = {f"{kind}_port": None for kind in ("grpc", "metrics") if values.get(f"allow_{kind}") is False}
    return fields | closed


def _load_models(values: dict[str, Any], options: TritonOptions) -> tuple[str, ...]:
    """The names of the models to load at the start. Raises ConfigError for an unknown one."""
    names = values.get("load_models", [] if values.get("options.model_control") == "explicit" else ["*"])
    tests = NAMES if values.get("test_models") else ()
    known = [*(model.name for model in options.models), *tests]
    for name in names:
        if name not in ("*", *known):
            raise ConfigError(f"--load-model={name}: the repository has no such model.", cure=f"Use one of: {', '.join(known)}.")
    return tuple(names)


def _tracing(trace: dict[str, Any], collector: str | None) -> dict[str, Any]:
    """The fields of ServerSettings for traces in the mode opentelemetry."""
    if trace.get("trace_mode") != "opentelemetry" or trace.get("trace_level", ["OFF"]) == ["OFF"]:
        return {}
    return {"otlp_endpoint": collector, "trace_sampling": 1 / int(trace.get("trace_rate", DEFAULTS["trace_rate"]))}


def _log_format(values: dict[str, Any]) -> str | None:
    """The format of Stoker's log for Triton's --log-format. None: that of the environment."""
    return LOG_FORMATS[values["log_format"]] if "log_format" in values else None


def _log_level(values: dict[str, Any]) -> str | None:
    """The level of Stoker's log for Triton's log options. None: that of the environment."""
    if values.get("log_verbose", 0) > 0:
        return "DEBUG"
    if values.get("log_info", True):
        return None
    return "WARNING" if values.get("log_warning", True) else "ERROR"


def main() -> int:
    """The program stoker-tritonserver: the command with all options of the command line."""
    from stoker.cli.main import main as run_stoker

    sys.argv.insert(1, "tritonserver")
    return run_stoker()
