"""`stoker rm`: removes engines from the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.base.errors import ConfigError, NotFoundError


def rm(
    engines: Annotated[list[str], typer.Argument(help="Names or ids of `stoker list`.")],
    every: Annotated[bool, typer.Option("--all", help="Remove every engine with this name, when there are several.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also remove an engine that a running server uses.")] = False,
) -> None:
    """Remove engines from the cache. Checkpoints and other files of yours are not removed.

    Examples:

      stoker rm SmolLM2-135M-Instruct

      stoker rm 3f2a91c04b7d 08d1e6a2c5f9
    """
    from stoker.cli.output.tables import format_size
    from stoker.deploy.cached_engines import matching_engines, remove_engine
    from stoker.server.processes.running import running_servers

    found = [(text, matching_engines(text)) for text in engines]
    in_use = {server.engine: server.url for server in running_servers()}
    for text, matches in found:  # check all before any is removed
        if not matches:
            raise NotFoundError(f"{text!r} is not the name or id of a cached engine.", cure="See stoker list.")
        if len(matches) > 1 and not every:
            ids = ", ".join(f"{engine.id} ({engine.quantization}, {engine.dtype})" for engine in matches)
            raise ConfigError(f"{text} is the name of {len(matches)} engines: {ids}.", cure="Use an id, or --all.")
        used = next((in_use[engine.path] for engine in matches if engine.path in in_use), None)
        if used is not None and not force:
            raise ConfigError(f"{text} is served at {used}.", cure="Stop the server, or use --force.")
    for engine in {engine.path: engine for _, matches in found for engine in matches}.values():
        remove_engine(engine)
        typer.echo(f"Removed {engine.name} ({engine.id}), {format_size(engine.num_bytes)}.")
