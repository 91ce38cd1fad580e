"""Reads the config.pbtxt files of a model repository and finds the kind of each model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.deploy.deployment import Origin, PlacedError, has_configuration_file
from stoker.deploy.syntax.pbtxt import Message, Scalar, read_message
from stoker.server.protocols.kserve.model_config import KINDS

CONFIG = "config.pbtxt"
MAX_MODELS = 64
# Input → the only kind of model that has it.
_SIGNATURES = {"input_ids": "tensorrt_llm", "QUERY": "preprocessing", "TOKENS_BATCH": "postprocessing", "text_input": "tensorrt_llm_bls"}


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One config.pbtxt. `kind` is the kind of model (one of the five), or None for others."""

    file: str
    name: str  # of the directory; the file must have the same name
    kind: str | None
    message: Message
    parameters: tuple[tuple[str, Scalar], ...]  # in file order

    def origin(self, line: int) -> Origin:
        """The origin for a line of this file."""
        return Origin(self.file, line)

    def error(self, line: int, description: str, cure: str) -> PlacedError:
        """An error about a line of this file."""
        return PlacedError(self.origin(line), description, cure)

    def value_error(self, line: int, name: str, error: InvalidValueError) -> PlacedError:
        """The error for a value that the field `name` does not accept."""
        return PlacedError.of_value(self.origin(line), name, error)


def is_model_repository(path: Path) -> bool:
    """Whether `path` is a folder of model folders, without the configuration file of another format."""
    if not path.is_dir() or has_configuration_file(path) or (path / "config.json").exists():
        return False
    return any(path.glob(f"*/{CONFIG}"))


def config_files(path: Path) -> list[Path]:
    """The config.pbtxt files of all models. Raises ConfigError when there are none, or more than MAX_MODELS."""
    files = sorted(path.glob(f"*/{CONFIG}"))
    if not files:
        raise ConfigError(f"{path} contains no */{CONFIG}.", cure="Name the folder that contains the model folders.")
    if len(files) > MAX_MODELS:
        raise ConfigError(f"{path} contains {len(files)} models, more than {MAX_MODELS}.", cure="Name the repository of one engine.")
    return files


def read_models(path: Path) -> list[ModelFile]:
    """All models of the repository. Raises ConfigError naming file and line."""
    return [read_model(file) for file in config_files(path)]


def read_model(file: Path) -> ModelFile:
    """The model in one config.pbtxt. Raises ConfigError naming file and line."""
    message = read_message(file)
    name = file.parent.name
    return ModelFile(file=str(file), name=name, kind=_kind(name, message), message=message, parameters=_parameters(str(file), message))


def _parameters(file: str, message: Message) -> tuple[tuple[str, Scalar], ...]:
    """(key, value) of each parameter of a model."""
    found = []
    for entry in message.messages("parameters"):
        key, value = entry.scalar("key"), entry.message("value").scalar("string_value")
        if key is None:
            raise PlacedError(Origin(file, entry.line), "an entry of parameters has no key.", 'Write key: "name".')
        found.append((key.text, value or Scalar("", entry.line)))
    return tuple(found)


def _kind(name: str, message: Message) -> str | None:
    """The kind of a model, by the name of its folder or else by platform and inputs; None for other models."""
    if name in KINDS:
        return name
    platform = message.scalar("platform")
    if platform is not None and platform.text == "ensemble":
        return "ensemble"
    inputs = {scalar.text for tensor in message.messages("input") for scalar in tensor.scalars("name")}
    return next((kind for signature, kind in _SIGNATURES.items() if signature in inputs), None)
