"""`stoker package lmi`: an engine as SageMaker model data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError
from stoker.cli.engines import Model, prepare_engine


def lmi(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .tar.gz or .tar file to write.")] = Path("model.tar.gz"),
    settings: Annotated[
        list[str], typer.Option("--set", help="A further line of serving.properties, such as option.tgi_compat=true. Repeatable.")
    ] = [],  # noqa: B006
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write model data for SageMaker in LMI's layout for prebuilt engines: serving.properties and tensorrt_llm/1.

    SageMaker unpacks the file to /opt/ml/model, where Stoker's container serves it. To try it here, run: stoker serve model.tar.gz.

    Examples:

      stoker package lmi engine

      stoker package lmi engine -o llama.tar.gz --set option.batch_scheduler_policy=guaranteed_no_evict
    """
    from rich.console import Console

    from stoker.api.progress import ProgressBars
    from stoker.cli.prepare_server import engine_info
    from stoker.deploy.lmi.package import package

    if wrong := next((pair for pair in settings if "=" not in pair), None):
        raise ConfigError(f"--set {wrong!r} has no value.", cure="Write option.name=value.")
    pairs = dict(pair.split("=", 1) for pair in settings)
    info = engine_info(prepare_engine(model, None))
    with ProgressBars(Console(stderr=True)) as bars:
        digest = package(info, output, pairs, force=force, progress=bars)
    typer.echo(f"{output}  sha256 {digest}")
