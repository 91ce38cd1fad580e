"""A model repository on disk: its config.pbtxt files, parsed, and which of the five models each one is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError
from stoker.deploy import pbtxt
from stoker.deploy.deployment import Origin, PlacedError
from stoker.deploy.pbtxt import Message, Scalar
from stoker.server.protocols.kserve.model_config import KINDS

CONFIG = "config.pbtxt"
MAX_MODELS = 64
# An input that only one kind of model takes.
_SIGNATURES = {"input_ids": "tensorrt_llm", "QUERY": "preprocessing", "TOKENS_BATCH": "postprocessing", "text_input": "tensorrt_llm_bls"}


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One config.pbtxt."""

    file: str
    name: str  # the directory's, which Triton wants the file to repeat
    kind: str | None  # which of the five models it plays; None: none of them
    message: Message
    parameters: tuple[tuple[str, Scalar], ...]  # in file order

    def origin(self, line: int) -> Origin:
        return Origin(self.file, line)

    def error(self, line: int, what: str, cure: str) -> PlacedError:
        return PlacedError(self.origin(line), what, cure)


def recognise(path: Path) -> bool:
    """A folder with model folders in it, and no other format's file at its root."""
    if not path.is_dir() or any((path / name).exists() for name in ("serving.properties", "config.yaml", "config.json")):
        return False
    return any(path.glob(f"*/{CONFIG}"))


def config_files(path: Path) -> list[Path]:
    """Raises ConfigError when there are none, or too many."""
    files = sorted(path.glob(f"*/{CONFIG}"))
    if not files:
        raise ConfigError(f"{path} holds no */{CONFIG}.", cure="Name the folder whose folders are models.")
    if len(files) > MAX_MODELS:
        raise ConfigError(f"{path} holds {len(files)} models, more than {MAX_MODELS}.", cure="Name the repository of one engine.")
    return files


def read(path: Path) -> list[ModelFile]:
    """Every model of the repository. Raises ConfigError naming file and line."""
    return [read_model(file) for file in config_files(path)]


def read_model(file: Path) -> ModelFile:
    message = pbtxt.read(file)
    name = file.parent.name
    return ModelFile(file=str(file), name=name, kind=_kind(name, message), message=message, parameters=_parameters(str(file), message))


def _parameters(file: str, message: Message) -> tuple[tuple[str, Scalar], ...]:
    found = []
    for entry in message.messages("parameters"):
        key, value = entry.scalar("key"), entry.message("value").scalar("string_value")
        if key is None:
            raise PlacedError(Origin(file, entry.line), "an entry of parameters has no key.", 'Write key: "name".')
        found.append((key.text, value or Scalar("", entry.line)))
    return tuple(found)


def _kind(name: str, message: Message) -> str | None:
    """By the directory's name, else by what the model takes."""
    if name in KINDS:
        return name
    platform = message.scalar("platform")
    if platform is not None and platform.text == "ensemble":
        return "ensemble"
    inputs = {scalar.text for tensor in message.messages("input") for scalar in tensor.scalars("name")}
    return next((kind for signature, kind in _SIGNATURES.items() if signature in inputs), None)
