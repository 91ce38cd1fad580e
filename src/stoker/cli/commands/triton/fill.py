"""`stoker triton fill`: template variables of a config.pbtxt replaced by values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError, reason_of


def fill(
    file: Annotated[Path, typer.Argument(help="A config.pbtxt.")],
    substitutions: Annotated[str, typer.Argument(help="name:value,name:value")],
    in_place: Annotated[bool, typer.Option("--in_place", "-i", help="Change the file. Without it, the result is printed.")] = False,
) -> None:
    """Replace each ${name} of a config.pbtxt by its value. Variables without a given value are left as they are.

    A comma or colon inside a value is written \\, or \\:.

    Examples:

      stoker triton fill repo/tensorrt_llm/config.pbtxt "engine_dir:engine"

      stoker triton fill -i repo/tensorrt_llm/config.pbtxt "engine_dir:engine,decoupled_mode:true"
    """
    from stoker.deploy.triton.fill import fill_template

    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}.", cure="Name a config.pbtxt.") from None
    text = fill_template(template, substitutions)
    if in_place:
        file.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)
