"""`stoker export truss`: an engine as a Truss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.engines import Model, prepare_engine
from stoker.cli.options import TEMPLATE_SETTINGS, parse_template_settings


def truss(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    accelerator: Annotated[
        str, typer.Option(help="The platform's name of the GPU; one is requested for each rank of the engine. none: run on the CPU.")
    ] = "A100",
    model_name: Annotated[str | None, typer.Option(help="The name that OpenAI clients use. Default: the name of the model.")] = None,
    settings: Annotated[list[str], TEMPLATE_SETTINGS] = [],  # noqa: B006
) -> None:
    """Write config.yaml, model/model.py, and packages/ with a Triton repository and the engine.

    `stoker serve` serves the folder directly. The server of the truss package runs model.py, which starts Stoker and forwards requests to
    its gRPC endpoint. --set changes the settings of the Triton repository.

    Examples:

      stoker export truss engine my-truss --accelerator H100

      stoker export truss engine my-truss --set max_tokens_in_paged_kv_cache:100000

      stoker serve my-truss
    """
    from stoker.cli.prepare_server import engine_info
    from stoker.deploy.truss.export import export_truss

    options = parse_template_settings(settings) | {"accelerator": accelerator} | ({"model_name": model_name} if model_name else {})
    for file in export_truss(engine_info(prepare_engine(model, None)), folder, options):
        typer.echo(file)
