"""Reads the config.json of an engine without torch, and checks that the files of the engine are complete."""

from __future__ import annotations

import re
from collections.abc import Mapping as Records
from pathlib import Path
from typing import Any

import msgspec

from stoker import __version__
from stoker.base.config import Limits, Mapping
from stoker.base.errors import ConfigError, EngineError
from stoker.base.json_object import read_bounded_object
from stoker.engine.file_record import FileRecord

FORMAT_VERSION = 3
CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 64 << 20
REBUILD = "Build the engine again."
COPY_OR_REBUILD = "Copy the engine again, or build it again."


class SummarizedModel(msgspec.Struct, frozen=True):
    """The part of a model's description that `EngineSummary` has."""

    architecture: str
    vocab_size: int


class SummarizedTarget(msgspec.Struct, frozen=True):
    """The part of `Target` that `EngineSummary` has."""

    device: str = "cpu"


class EngineSummary(msgspec.Struct, frozen=True):
    """The part of an engine's config.json that is needed to prepare a server. `EngineConfig` describes the fields."""

    model: SummarizedModel
    limits: Limits
    dtype: str
    mapping: Mapping = Mapping()
    target: SummarizedTarget = SummarizedTarget()
    weights: str = "files"
    files: dict[str, FileRecord] = {}


def read_summary(path: Path) -> EngineSummary:
    """The summary of the engine in a directory. Raises EngineError if the directory is not an engine, or is incomplete."""
    plain = read_engine_config(path)
    try:
        summary = msgspec.convert(plain, EngineSummary)
    except (msgspec.ValidationError, ConfigError) as problem:
        raise EngineError(f"{path}: {CONFIG_FILE} is damaged ({problem}).", cure=REBUILD) from None
    check_files(path, summary.files, summary.mapping.world_size if summary.weights == "files" else 0)
    return summary


def rank_file_name(rank: int) -> str:
    """The name of the file with a rank's weights."""
    return f"rank{rank}.safetensors"


def engine_file(path: Path, name: str) -> Path:
    """The path of a file that config.json lists. Rank files may also have the names of LMI's model repositories."""
    file = path / name
    if (rank := re.fullmatch(r"rank(\d+)\.safetensors", name)) and not file.exists():
        return next(path.glob(f"trt_llm_model_*_rank{rank[1]}.engine"), file)
    return file


def check_files(path: Path, files: Records[str, FileRecord], num_ranks: int) -> None:
    """Raise EngineError unless all `files` of config.json exist with the listed sizes, and `num_ranks` files of ranks are listed."""
    for name, record in files.items():
        file = engine_file(path, name)
        if Path(name).name != name:
            raise EngineError(f"{path}: {CONFIG_FILE} lists {name!r}, which is not a file name.", cure=REBUILD)
        if not file.is_file():
            raise EngineError(f"{file} is missing.", cure=COPY_OR_REBUILD)
        if (size := file.stat().st_size) != record.size:
            raise EngineError(f"{file} is truncated or changed: it has {size} bytes, and {record.size} were written.", cure=COPY_OR_REBUILD)
    for rank in range(num_ranks):
        if rank_file_name(rank) not in files:
            raise EngineError(f"{path}: {CONFIG_FILE} lists no {rank_file_name(rank)}.", cure=REBUILD)


def read_engine_config(path: Path) -> dict[str, Any]:
    """The content of an engine's config.json. Raises EngineError for any other file and for another format version."""
    file = path / CONFIG_FILE
    build = f"Run: stoker build {path} -o ENGINE."
    if not file.is_file():
        if path.suffix == ".gguf" and path.is_file():
            raise EngineError(f"{path} is not an engine: it is a GGUF file.", cure=build)
        problem = f"it has no {CONFIG_FILE}" if path.is_dir() else "it does not exist"
        raise EngineError(f"{path} is not an engine: {problem}.", cure="Name a directory that stoker build wrote.")
    plain = read_bounded_object(file, MAX_CONFIG_BYTES, EngineError, REBUILD)
    if "format_version" not in plain:
        is_checkpoint = "model_type" in plain or "architectures" in plain
        problem = "it is a Hugging Face checkpoint" if is_checkpoint else f"{CONFIG_FILE} has no format_version"
        raise EngineError(f"{path} is not an engine: {problem}.", cure=build)
    if plain["format_version"] != FORMAT_VERSION:
        found = f"engine format {plain['format_version']!r} (Stoker {plain.get('stoker_version')})"
        raise EngineError(
            f"{path} has {found}, and this Stoker {__version__} reads format {FORMAT_VERSION}.",
            cure="Build the engine again with this Stoker.",
        )
    return plain
