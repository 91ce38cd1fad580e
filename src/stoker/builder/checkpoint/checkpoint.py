"""A checkpoint: its config, its weights, its other files, whatever form it came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import read_json
from stoker.builder.checkpoint.weights import NoWeights, Weights, open_weights
from stoker.builder.gguf.weights import GGUFWeights

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`config` is config.json's data, or the same made from GGUF metadata."""

    path: Path
    name: str
    config: dict[str, Any]
    weights: Weights
    gguf: GGUFWeights | None = None
    extra_files: list[Path] = field(default_factory=list)  # tokenizer and settings, beside config.json

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside config.json; empty when there is none."""
        file = self.path / name
        return read_json(file) if self.gguf is None and file.is_file() else {}

    @property
    def files(self) -> list[Path]:
        """All files that the engine may depend on."""
        return [*self.weights.files, *self.extra_files]


def open_checkpoint(path: Path, name: str | None = None, *, weights: bool = True) -> Checkpoint:
    """A Hugging Face directory, a GGUF file, or a directory that holds one GGUF file. `weights=False`: a config.json is enough.

    Raises CheckpointError naming what is missing or damaged.
    """
    name = name or path.resolve().name
    gguf = _gguf_file(path)
    if gguf is not None:
        opened = GGUFWeights(gguf)
        return Checkpoint(path, name, opened.config, opened, gguf=opened)
    file = path if path.is_file() and path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no config.json and is no GGUF file.", cure="Name a Hugging Face checkpoint directory or a .gguf file."
        )
    small = sorted({f for pattern in SMALL_FILES for f in file.parent.glob(pattern) if f.is_file()} if path.is_dir() else {file})
    return Checkpoint(file.parent, name, read_json(file), open_weights(path) if weights else NoWeights(), extra_files=small)


def _gguf_file(path: Path) -> Path | None:
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"{path} holds several GGUF files: {names}.", cure="Name one of them.")
        return found[0] if found else None
    return None
