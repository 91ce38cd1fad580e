"""`stoker inspect`: the settings, files and tensors of an engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.engines import Model, prepare_engine

if TYPE_CHECKING:
    from stoker.engine.config import EngineConfig
    from stoker.engine.reader import Engine


def inspect(
    model: Model,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print config.json instead of a table.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the stored tensors.")] = False,
) -> None:
    """Show an engine's model, limits, target and files.

    Examples:

      stoker inspect engine --verify

      stoker inspect engine --tensors
    """
    from rich.console import Console

    from stoker.api.progress import ProgressBars
    from stoker.cli.output.tables import name_value_table

    engine = prepare_engine(model, None)

    from stoker.engine.config import encode_engine_config
    from stoker.engine.reader import Engine

    with ProgressBars(Console(stderr=True)) as bars:
        opened = Engine.open(engine, verify=verify, progress=partial(bars, "verify"))
    if as_json:
        typer.echo(encode_engine_config(opened.config), nl=False)
        return
    console = Console()
    console.print(name_value_table(model, _config_rows(opened.config)))
    files = [(name, f"{r.size:,} bytes  sha256 {r.sha256[:16]}…") for name, r in opened.config.files.items()]
    console.print(name_value_table("files", files))
    if tensors:
        console.print(name_value_table("tensors", _tensor_rows(opened)))
    if verify:
        console.print("Every file has the digest that config.json lists.")


def _config_rows(config: EngineConfig) -> list[tuple[str, str]]:
    """(name, value) rows for the engine's config."""
    import msgspec

    from stoker.cli.output.build_checks import describe_checks

    model, target = config.model, config.target
    limits = msgspec.to_builtins(config.limits)
    return [
        ("architecture", model.architecture),
        ("layers, hidden size, vocabulary", f"{model.num_layers}, {model.hidden_size}, {model.vocab_size}"),
        ("positions", str(model.max_positions)),
        ("dtype", config.dtype),
        ("quantization", config.recipe.name),
        ("KV cache", config.recipe.kv_cache or config.dtype),
        ("weights", config.weights),
        ("limits", ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)),
        ("ranks", str(config.mapping)),
        ("target", f"{target.device} {target.compute_capability or ''}".strip()),
        ("checkpoint", f"{config.checkpoint.name} ({config.checkpoint.fingerprint[:16]}…)"),
        ("built by", f"Stoker {config.stoker_version}"),
        *((f"check: {name}", sentence) for name, sentence in describe_checks(config.checks).items()),
    ]


def _tensor_rows(engine: Engine) -> list[tuple[str, str]]:
    """(name, dtype and shape) rows for the stored tensors."""
    from stoker.base.errors import EngineError
    from stoker.engine.safetensors_header import read_header

    files = [engine.file(name) for name in engine.config.files if name.endswith(".safetensors")]
    entries = {name: entry for file in files for name, entry in read_header(file, EngineError, "Build the engine again.").items()}
    return [(name, f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}") for name, entry in entries.items()]
