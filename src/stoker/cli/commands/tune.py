"""`stoker tune`: measures kernel tiles for an engine on this machine's GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.cli.engines import Model, prepare_engine


def tune(
    model: Model,
    list_shapes: Annotated[bool, typer.Option("--list", help="Only list the shapes that would be measured. Needs no GPU.")] = False,
) -> None:
    """Measure kernel tiles for the shapes of an engine on this machine's GPU, and write the fastest to tuning.json in its directory.

    The engine uses them from its next start on, on GPUs of this name. Other GPUs ignore the file. Delete it to return to the tiles of the
    package.

    Examples:

      stoker tune engine

      stoker tune engine --list
    """
    import torch
    from rich.console import Console

    from stoker.api.progress import ProgressBars
    from stoker.base.errors import ConfigError
    from stoker.engine.reader import Engine
    from stoker.profiling.engine_tuning import engine_tile_keys, tune_tiles, write_engine_tuning
    from stoker.runtime.aot import target_capability

    console = Console()
    engine = prepare_engine(model, None)
    opened = Engine.open(engine)
    if opened.config.target.device != "cuda":
        cure = "Build it with --device cuda."
        raise ConfigError(f"{engine} was built for {opened.config.target.device}, which has no kernel tiles to measure.", cure=cure)
    if list_shapes:
        for op, dtype, shape in engine_tile_keys(engine, target_capability(opened) or 90):
            console.print(f"{op} {dtype} {' × '.join(map(str, shape))}", highlight=False)
        return
    if not torch.cuda.is_available():
        cure = "Run stoker doctor to see why, or run this command on the machine that serves the engine."
        raise ConfigError("stoker tune measures kernels on a GPU, and this machine has none that torch can use.", cure=cure)
    opened.check_device(torch.device("cuda"))
    from stoker.profiling.tile_cases import candidate_tiles, is_measurable, time_tiles

    major, minor = torch.cuda.get_device_capability()
    capability, device = 10 * major + minor, torch.cuda.get_device_name()
    keys = engine_tile_keys(engine, capability)
    measurable = [key for key in keys if is_measurable(key)]
    with ProgressBars(console) as progress:
        tiles = tune_tiles(measurable, candidate_tiles, time_tiles, progress)
    path = write_engine_tuning(engine, device, capability, tiles)
    console.print(f"{len(tiles)} tiles for {device} are in {path}; {len(keys) - len(tiles)} other shapes keep the tiles of the package.")
