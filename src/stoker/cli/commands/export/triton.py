"""`stoker export triton`: an engine as a Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.engines import Model, prepare_engine
from stoker.cli.options import TEMPLATE_SETTINGS, parse_template_settings


def triton(
    model: Model,
    repository: Annotated[Path, typer.Argument(help="The folder to write.")],
    settings: Annotated[list[str], TEMPLATE_SETTINGS] = [],  # noqa: B006
) -> None:
    """Write the models preprocessing, tensorrt_llm, postprocessing, ensemble and tensorrt_llm_bls.

    `stoker serve` and a real Triton server can both serve the repository. It refers to the engine by its path.

    Examples:

      stoker export triton engine repo

      stoker export triton engine repo --set decoupled_mode:true,max_queue_size:100
    """
    from stoker.cli.prepare_server import engine_info
    from stoker.deploy.triton.export import export_triton

    for file in export_triton(engine_info(prepare_engine(model, None)), repository, parse_template_settings(settings)):
        typer.echo(file)
