"""`stoker eval`: what an engine's answers are worth."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError
from stoker.cli.command import Command

COMMANDS = (
    Command(
        "perplexity",
        "stoker.cli.eval:perplexity",
        "How well an engine foretells a text; lower is better.",
        "stoker eval perplexity engine --text book.txt",
    ),
)


def perplexity(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window; each is read on its own, without a BOS token.")] = 1024,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Read so many bytes of the text. Default: all.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: what the engine was built for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the perplexity of an engine, layer by layer: any size of model fits.

    Examples:

      stoker eval perplexity engine --text book.txt

      stoker eval perplexity engine --text book.txt --max-bytes 100000 --json
    """
    import json

    import torch
    from rich.console import Console
    from tokenizers import Tokenizer

    from stoker.base import env
    from stoker.base.config import DEVICES, check_choice
    from stoker.base.errors import EngineError
    from stoker.cli.progress import Bars
    from stoker.engine.layerwise import LayerStream, windows
    from stoker.engine.reader import Engine

    if device is not None:
        check_choice("device", device, DEVICES)
    opened = Engine.open(engine)
    opened.check_world(1)
    if not (engine / "tokenizer.json").is_file():
        raise EngineError(f"{engine} has no tokenizer.", cure="Build it again with --tokenizer.")
    content = _read(text, max_bytes)
    ids = Tokenizer.from_file(str(engine / "tokenizer.json")).encode(content, add_special_tokens=False).ids
    pieces = windows(ids, window)
    if not pieces:
        raise ConfigError(f"{text} has less than two tokens.", cure="Name a longer text.")
    torch.set_num_threads(env.num_threads())
    loader = opened.loader(0, torch.device(device or opened.config.target.device))
    with Bars(Console(stderr=True)) as bars:
        scores = LayerStream(opened.config.model, pieces).run(loader, lambda done, total: bars("layers", done, total))
    found = {"perplexity": scores.perplexity, "tokens": scores.count, "windows": len(pieces), "quantization": opened.config.recipe.name}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"{engine}: perplexity {scores.perplexity:.3f} over {scores.count} tokens in {len(pieces)} windows of {window}")


def _read(text: Path, max_bytes: int | None) -> str:
    """The file's text, or what its first bytes hold of it: whole characters. Raises ConfigError."""
    try:
        with text.open("rb") as file:
            held = file.read(-1 if max_bytes is None else max_bytes)
        return codecs.getincrementaldecoder("utf-8")().decode(held, final=max_bytes is None or len(held) < max_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read: {error}.", cure="Name a UTF-8 text file.") from None
