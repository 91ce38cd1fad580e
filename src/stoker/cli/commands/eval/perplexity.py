"""`stoker eval perplexity`: the perplexity of an engine on a text file."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.base.config import DEVICES, RuntimeConfig, check_choice
from stoker.base.errors import ConfigError, EngineError, reason_of
from stoker.base.process import importing
from stoker.cli.engines import Model, prepare_engine
from stoker.cli.options import build_options
from stoker.deploy.build_settings import BuildSettings


@build_options
def perplexity(
    model: Model,
    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    window: Annotated[int, typer.Option(min=2, help="Tokens per window. Windows are independent and have no BOS token.")] = 1024,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Use only the first bytes of the text. Default: all.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the device that the engine was built for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    build: BuildSettings,
) -> None:
    """Measure the perplexity of an engine on a text.

    The engine runs layer by layer, so a model of any size fits into memory.

    Examples:

      stoker eval perplexity engine --text book.txt

      stoker eval perplexity engine --text book.txt --max-bytes 100000 --json
    """
    if device is not None:
        check_choice("device", device, DEVICES)
    content = _read_text(text, max_bytes)
    with importing():
        import torch
        from rich.console import Console
        from tokenizers import Tokenizer

        from stoker.api.progress import ProgressBars
        from stoker.base import env
        from stoker.engine.layerwise import LayerwiseModel, split_windows
        from stoker.engine.reader import Engine

    engine = prepare_engine(model, RuntimeConfig(device=device), build)
    opened = Engine.open(engine)
    opened.check_world(1)
    if not (engine / "tokenizer.json").is_file():
        raise EngineError(f"{engine} has no tokenizer.", cure="Build it again with --tokenizer.")
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    token_ids = tokenizer.encode(content, add_special_tokens=False).ids
    token_windows = split_windows(token_ids, window)
    if not token_windows:
        raise ConfigError(f"{text} has less than two tokens.", cure="Name a longer text.")
    torch.set_num_threads(env.num_threads())
    loader = opened.loader(0, torch.device(device or opened.config.target.device))
    with ProgressBars(Console(stderr=True)) as bars:
        scores = LayerwiseModel(opened.config.model, token_windows).run(loader, lambda done, total: bars("layers", done, total))
    if as_json:
        result = {
            "perplexity": scores.perplexity, "tokens": scores.count, "windows": len(token_windows),
            "quantization": opened.config.recipe.name,
        }  # fmt: skip
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{model}: perplexity {scores.perplexity:.3f} over {scores.count} tokens in {len(token_windows)} windows of {window}")


def _read_text(file: Path, max_bytes: int | None) -> str:
    """The text of a UTF-8 file, or the whole characters in its first `max_bytes` bytes. Raises ConfigError for another encoding."""
    try:
        with file.open("rb") as opened:
            data = opened.read(-1 if max_bytes is None else max_bytes)
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=max_bytes is None or len(data) < max_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}.", cure="Name a UTF-8 text file.") from None
