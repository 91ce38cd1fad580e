"""`stoker pull`: fetches a model and builds its engine, so that later commands start at once."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.base.config import RuntimeConfig
from stoker.cli.engines import Model, prepare_engine, prepare_files
from stoker.cli.options import build_options
from stoker.deploy.build_settings import BuildSettings


@build_options
def pull(
    model: Model,
    download_only: Annotated[bool, typer.Option("--download-only", help="Fetch the files, and build no engine.")] = False,
    device: Annotated[str | None, typer.Option(help="Device of the engine: cpu or cuda. Default: cuda when a GPU is present.")] = None,
    *,
    build: BuildSettings,
) -> None:
    """Fetch a model and build its engine. Both are cached; commands that name the same model with the same settings use them.

    Without a network, a model of the hub that was fetched before is used from the hub's cache.

    Examples:

      stoker pull HuggingFaceTB/SmolLM2-135M-Instruct

      stoker pull meta-llama/Llama-3.1-8B-Instruct --quantize FP8

      stoker pull s3://bucket/models/Llama-3-8B --download-only
    """
    if download_only:
        typer.echo(prepare_files(model))
        return
    from stoker.deploy.model_name import model_name_of

    engine = prepare_engine(model, RuntimeConfig(device=device), build)
    typer.echo(engine)
    typer.echo(f"Run it: stoker chat {model_name_of(engine)}", err=True)
