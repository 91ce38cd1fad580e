"""`stoker export`: an engine in the format of another server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError
from stoker.cli.command import Command

COMMANDS = (
    Command(
        "triton",
        "stoker.cli.export:triton",
        "The five models of an inflight_batcher_llm repository.",
        "stoker export triton engine repo --set decoupled_mode:true",
    ),
)


def triton(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    repository: Annotated[Path, typer.Argument(help="The folder to write.")],
    settings: Annotated[
        list[str], typer.Option("--set", help="A template variable or parameter, as name:value; commas join several. May be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Write preprocessing, tensorrt_llm, postprocessing, ensemble and tensorrt_llm_bls, for `stoker serve` and for a real Triton server."""
    from stoker.cli.deployed import engine_info
    from stoker.deploy.triton.export import export_triton

    pairs = [pair for text in settings for pair in text.split(",") if pair]
    if wrong := next((pair for pair in pairs if ":" not in pair), None):
        raise ConfigError(f"--set {wrong!r} is no pair.", cure="Write name:value.")
    for file in export_triton(engine_info(engine), repository, dict(pair.split(":", 1) for pair in pairs)):
        typer.echo(file)
