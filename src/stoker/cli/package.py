"""`stoker package`: an engine as one file that another service takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError
from stoker.cli.command import Command

COMMANDS = (
    Command(
        "lmi",
        "stoker.cli.package:lmi",
        "SageMaker model data: a tar with serving.properties and the engine.",
        "stoker package lmi engine -o model.tar.gz",
    ),
)


def lmi(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .tar.gz or .tar to write.")] = Path("model.tar.gz"),
    settings: Annotated[
        list[str], typer.Option("--set", help="A further line of serving.properties, as option.tgi_compat=true. May be repeated.")
    ] = [],  # noqa: B006
    force: Annotated[bool, typer.Option("--force", help="Replace the file that is there.")] = False,
) -> None:
    """Write model data that SageMaker unpacks to /opt/ml/model: LMI's prebuilt layout, tensorrt_llm/1 under serving.properties.

    Upload it, and start Stoker's container with it; or try it here: stoker serve model.tar.gz.

    Examples:

      stoker package lmi engine

      stoker package lmi engine -o llama.tar.gz --set option.batch_scheduler_policy=guaranteed_no_evict
    """
    from rich.console import Console

    from stoker.cli.deployed import engine_info
    from stoker.cli.progress import Bars
    from stoker.deploy.lmi_package import package

    if wrong := next((pair for pair in settings if "=" not in pair), None):
        raise ConfigError(f"--set {wrong!r} is no pair.", cure="Write option.name=value.")
    pairs = dict(pair.split("=", 1) for pair in settings)
    with Bars(Console(stderr=True)) as bars:
        digest = package(engine_info(engine), output, pairs, force=force, progress=bars)
    typer.echo(f"{output}  sha256 {digest}")
