"""A checkpoint: its configuration, weights and other files, in any supported layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import first_part
from stoker.builder.checkpoint.gguf.weights import GGUFWeights
from stoker.builder.checkpoint.json_file import read_json_object
from stoker.builder.checkpoint.tensorrt_llm.config import hugging_face_config, is_tensorrt_llm_checkpoint
from stoker.builder.checkpoint.tensorrt_llm.weights import TensorRTLLMWeights
from stoker.builder.checkpoint.weight_files import open_weights
from stoker.builder.checkpoint.weights import CheckpointWeights, NoWeights

_EXTRA_FILES = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint."""

    path: Path
    name: str
    config: dict[str, Any]  # the data of config.json, or the equivalent from GGUF metadata
    weights: CheckpointWeights
    gguf: GGUFWeights | None = None
    extra_files: list[Path] = field(default_factory=list)  # tokenizer, settings and config.json

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the checkpoint; empty when the file does not exist."""
        file = self.path / name
        return read_json_object(file) if self.gguf is None and file.is_file() else {}

    def setting(self, key: str) -> Any:
        """The value of a key of config.json, or of its text_config, where multimodal checkpoints have it; None when it is absent."""
        text = self.config.get("text_config")
        value = self.config.get(key)
        return text.get(key) if value is None and isinstance(text, dict) else value

    @property
    def files(self) -> list[Path]:
        """All files that can influence the engine."""
        return [*self.weights.files, *self.extra_files]


def open_checkpoint(path: Path, name: str | None = None, *, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face directory, a GGUF file, or a directory with one GGUF file. `weights=False`: config.json is sufficient.

    Raises CheckpointError naming what is missing or damaged.
    """
    name = name or path.resolve().name
    gguf = _find_gguf(path)
    if gguf is not None:
        opened = GGUFWeights(gguf)
        return Checkpoint(path, name, opened.config, opened, gguf=opened)
    config = path if path.is_file() and path.suffix == ".json" else path / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"{path} has no config.json and is not a GGUF file.", cure="Name a Hugging Face checkpoint directory or a .gguf file."
        )
    extra_files = {f for pattern in _EXTRA_FILES for f in path.glob(pattern) if f.is_file()} if path.is_dir() else {config}
    data = read_json_object(config)
    _reject_engine(config, data)
    _reject_engine_of_tensorrt(config, data)
    if is_tensorrt_llm_checkpoint(data):
        converted = hugging_face_config(data, str(config.parent))
        merged = TensorRTLLMWeights(config.parent, data, converted) if weights else NoWeights()
        return Checkpoint(config.parent, name, converted, merged, extra_files=sorted(extra_files))
    return Checkpoint(config.parent, name, data, open_weights(path) if weights else NoWeights(), extra_files=sorted(extra_files))


def _reject_engine(file: Path, data: dict[str, Any]) -> None:
    """Raise CheckpointError for the config.json of an engine that `stoker build` wrote."""
    if "stoker_version" in data and "checkpoint" in data:
        cure = "Build from the checkpoint that it was made from, or run stoker export hf ENGINE DIRECTORY to get one back."
        raise CheckpointError(f"{file.parent} is an engine, and not a checkpoint.", cure=cure)


def _reject_engine_of_tensorrt(file: Path, data: dict[str, Any]) -> None:
    """Raise CheckpointError for the config.json of a TensorRT engine."""
    if "pretrained_config" not in data or "build_config" not in data or "architectures" in data:
        return
    pretrained = data["pretrained_config"]
    name = pretrained.get("architecture", "its model") if isinstance(pretrained, dict) else "its model"
    raise CheckpointError(
        f"{file.parent} is a TensorRT engine of {str(name)[:60]}: compiled code for one kind of GPU, from which weights cannot be read.",
        cure="Build from the checkpoint that trtllm-build read (its --checkpoint_dir), or from the Hugging Face checkpoint.",
    )


def _find_gguf(path: Path) -> Path | None:
    """The GGUF file at `path`, or the only one in a directory without config.json; else None. Raises CheckpointError for several."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted({first_part(file) for file in path.glob("*.gguf")})
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"{path} holds several GGUF files: {names}.", cure="Name one of them.")
        return found[0] if found else None
    return None
