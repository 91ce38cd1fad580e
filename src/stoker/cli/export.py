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
    Command(
        "truss",
        "stoker.cli.export:truss",
        "A Truss with the engine inside, for the truss package.",
        "stoker export truss engine my-truss --accelerator H100",
    ),
)
_SETTINGS = typer.Option("--set", help="A template variable or parameter, as name:value; commas join several. May be repeated.")


def triton(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    repository: Annotated[Path, typer.Argument(help="The folder to write.")],
    settings: Annotated[list[str], _SETTINGS] = [],  # noqa: B006
) -> None:
    """Write preprocessing, tensorrt_llm, postprocessing, ensemble and tensorrt_llm_bls, for `stoker serve` and for a real Triton server."""
    from stoker.cli.deployed import engine_info
    from stoker.deploy.triton.export import export_triton

    for file in export_triton(engine_info(engine), repository, _pairs(settings)):
        typer.echo(file)


def truss(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    accelerator: Annotated[
        str, typer.Option(help="The platform's name of the GPU, one for each rank of the engine; none for the CPU.")
    ] = "A100",
    model_name: Annotated[str | None, typer.Option(help="The name that OpenAI clients use. Default: the engine's folder.")] = None,
    settings: Annotated[list[str], _SETTINGS] = [],  # noqa: B006
) -> None:
    """Write config.yaml, model/model.py, and packages/ with a Triton repository and the engine.

    `stoker serve` takes the folder as it is. So does the truss package, whose server runs model.py: that starts Stoker and proxies JSON
    to its gRPC stream. Settings are those of the repository.

    Examples:

      stoker export truss engine my-truss

      stoker export truss engine my-truss --accelerator H100 --set max_tokens_in_paged_kv_cache:100000

      stoker serve my-truss
    """
    from stoker.cli.deployed import engine_info
    from stoker.deploy.truss import export

    options = _pairs(settings) | {"accelerator": accelerator} | ({"model_name": model_name} if model_name else {})
    for file in export(engine_info(engine), folder, options):
        typer.echo(file)


def _pairs(settings: list[str]) -> dict[str, str]:
    pairs = [pair for text in settings for pair in text.split(",") if pair]
    if wrong := next((pair for pair in pairs if ":" not in pair), None):
        raise ConfigError(f"--set {wrong!r} is no pair.", cure="Write name:value.")
    return dict(pair.split(":", 1) for pair in pairs)
