"""Checks the options of `stoker serve` that a Slurm job runs it with."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from stoker.base.config import check_within_limits
from stoker.base.errors import ConfigError
from stoker.cli.command_table import USAGE_ERROR, load_command, load_target, usage_problem
from stoker.cli.commands import COMMANDS
from stoker.cli.config_file import checked_value
from stoker.cli.options import BUILD_HELP, structs_of
from stoker.cli.ray_options import RAY_HELP
from stoker.deploy.deployment import EngineInfo

# Parameter of `stoker serve`, which the scripts set or which a job cannot use: what to do instead.
RESERVED = {
    "model": "Leave it out: the job serves the engine", "dry_run": "Leave it out", "stop_at_eof": "Leave it out", "help": "Leave it out",
    "host": "Use --host of stoker export slurm", "http_port": "Use --port of stoker export slurm",
    "drain_timeout_s": "Use --drain-timeout-s of stoker export slurm", "nnodes": "Use --nodes of stoker export slurm",
    "node_rank": "Leave it out: Slurm sets it", "rendezvous": "Leave it out: the job sets it",
    **dict.fromkeys(RAY_HELP, "Use stoker export ray"), **dict.fromkeys(BUILD_HELP, "Leave it out, or build another engine"),
}  # fmt: skip


def check_serve_options(text: str, engine: EngineInfo) -> None:
    """Raise ConfigError for options that `stoker serve` refuses with this engine, or that the scripts of a job set.

    Files that options name, such as --config, may exist on the hosts of the job only. They are not read.
    """
    row = next(row for row in COMMANDS if row.name == "serve")
    command = load_command(row)
    context = typer.Context(command, info_name="stoker serve", **command.context_settings)
    try:
        given, _, _ = command.make_parser(context).parse_args(shlex.split(text))
    except USAGE_ERROR as error:
        raise ConfigError(f"serve_options={text!r} is refused: {usage_problem(error)}.", cure="See stoker serve --help.") from None
    values: dict[str, Any] = {}
    for parameter in command.get_params(context):
        if (value := given.get(parameter.name)) is None or parameter.name == "config":
            continue
        shown = next((option for option in parameter.opts if option.startswith("--")), value)
        if parameter.name in RESERVED:
            raise ConfigError(f"serve_options: {shown} is refused.", cure=f"{RESERVED[parameter.name]}.")
        values[parameter.name] = checked_value(context, parameter, value, f"serve_options: {shown}")
    check_within_limits(engine.limits, structs_of(load_target(row), values)["runtime"])
