"""Opening an engine directory: everything that can be wrong is refused here, in one line, before anything loads."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from stoker import __version__
from stoker.base.errors import EngineError
from stoker.distributed.group import SINGLE, Group
from stoker.engine.config import FORMAT_VERSION, EngineConfig, decode, rank_metadata
from stoker.engine.tensor_file import read_metadata
from stoker.engine.tensor_source import DummySource, FileSource
from stoker.layers.loader import Loader
from stoker.quant.format import TensorSource

CONFIG = "config.json"
MAX_CONFIG_BYTES = 64 << 20


def rank_file(rank: int) -> str:
    """The name of a rank's weights."""
    return f"rank{rank}.safetensors"


class Engine:
    """An engine directory that was checked: version, files and their sizes."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.path = path
        self.config = config

    @staticmethod
    def open(path: str | Path, *, verify: bool = False) -> Engine:
        """Open a directory. `verify` re-reads every file and compares digests.

        Raises EngineError, naming both sides and the cure, for what is no engine, of another format version, or incomplete.
        """
        path = Path(path)
        engine = Engine(path, decode(_read_config(path), path))
        engine._check_sizes()
        if verify:
            engine.verify()
        return engine

    @property
    def world_size(self) -> int:
        return self.config.mapping.world_size

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the KV cache stores."""
        return getattr(torch, self.config.recipe.kv_cache or self.config.dtype)

    def file(self, name: str) -> Path:
        """Where a file that config.json lists is. A rank's weights may have the name that LMI's model repositories give them."""
        path = self.path / name
        if (rank := re.fullmatch(r"rank(\d+)\.safetensors", name)) and not path.exists():
            return next(self.path.glob(f"trt_llm_model_*_rank{rank[1]}.engine"), path)
        return path

    def verify(self) -> None:
        """Re-read every file. Raises EngineError naming the first whose digest is not the one that was written."""
        for name, record in self.config.files.items():
            found = _sha256(self.file(name))
            if found != record.sha256:
                sides = f"sha256 {found[:12]}…, {record.sha256[:12]}… was written"
                raise EngineError(f"{self.file(name)} is corrupt: {sides}.", cure="Copy the engine again, or build it again.")

    def check_world(self, size: int) -> None:
        """Raise EngineError unless `size` ranks are what the engine was built for."""
        if size != self.world_size:
            built = self.config.mapping
            message = (
                f"{self.path} was built for {self.world_size} ranks (tensor {built.tensor_parallel} × pipeline {built.pipeline_parallel})"
            )
            raise EngineError(f"{message}, and {size} run.", cure=f"Start {self.world_size} ranks, or build with --tensor-parallel {size}.")

    def check_device(self, device: torch.device) -> None:
        """Raise EngineError unless `device` is of the kind, and the compute capability, that the engine was built for."""
        target = self.config.target
        if device.type != target.device:
            cure = f"Run it there, or build again with --device {device.type}."
            raise EngineError(f"{self.path} was built for {target.device}, and {device.type} was asked for.", cure=cure)
        if device.type == "cuda" and target.compute_capability is not None:
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            if found != target.compute_capability:
                sides = f"compute capability {target.compute_capability}, and this device has {found}"
                raise EngineError(f"{self.path} was built for {sides}.", cure="Build the engine again on this device.")

    def source(self, rank: int = 0, device: torch.device | str = "cpu") -> TensorSource:
        """The stored tensors of a rank, on `device`."""
        device = torch.device(device)
        self.check_device(device)
        if self.config.weights == "dummy":
            return DummySource(device)
        self.check_rank(rank)
        return FileSource(self.file(rank_file(rank)), device)

    def loader(self, rank: int = 0, device: torch.device | str = "cpu", group: Group = SINGLE) -> Loader:
        """What `layers.decoder.Decoder` is made with on a rank. `group`: the tensor-parallel ranks."""
        config = self.config
        return Loader(self.source(rank, device), config.recipe, self.dtype, torch.device(device), group, config.sharding)

    def check_rank(self, rank: int) -> None:
        """Raise EngineError when a rank's file is of another build, or of another rank."""
        if self.config.weights == "dummy":
            return
        file, again = self.file(rank_file(rank)), "Copy the engine again, or build it again."
        found, wanted = read_metadata(file, EngineError, again), rank_metadata(self.config, rank)
        if found != wanted:
            says, belongs = (f"rank {of.get('rank')} of engine {of.get('engine', '')[:12]}" for of in (found, wanted))
            raise EngineError(f"{file} is of another build or rank: it says {says}, and {belongs} belongs there.", cure=again)

    def _check_sizes(self) -> None:
        for name, record in self.config.files.items():
            file = self.file(name)
            if Path(name).name != name:
                raise EngineError(f"{self.path}: config.json lists {name!r}, which is not a file in it.", cure="Build the engine again.")
            if not file.is_file():
                raise EngineError(f"{file} is missing.", cure="Copy the engine again, or build it again.")
            if (size := file.stat().st_size) != record.size:
                sides = f"{size} bytes, {record.size} were written"
                raise EngineError(f"{file} is truncated or changed: {sides}.", cure="Copy the engine again, or build it again.")
        if self.config.weights == "files":
            for rank in range(self.world_size):
                if rank_file(rank) not in self.config.files:
                    raise EngineError(f"{self.path}: config.json lists no {rank_file(rank)}.", cure="Build the engine again.")


def is_engine(path: str | Path) -> bool:
    """Whether a directory looks like an engine, whole or not."""
    try:
        return "format_version" in _parse(Path(path) / CONFIG)
    except (EngineError, OSError):
        return False


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    build = f"Run: stoker build {path} -o ENGINE."
    if not file.is_file():
        what = "is a GGUF file" if path.suffix == ".gguf" and path.is_file() else f"has no {CONFIG}" if path.is_dir() else "does not exist"
        raise EngineError(
            f"{path} is not an engine: it {what}.", cure=build if "GGUF" in what else "Name a directory that stoker build made."
        )
    plain = _parse(file)
    if "format_version" not in plain:
        what = "it is a Hugging Face checkpoint" if "model_type" in plain or "architectures" in plain else f"{CONFIG} has no format_version"
        raise EngineError(f"{path} is not an engine: {what}.", cure=build)
    if plain["format_version"] != FORMAT_VERSION:
        theirs = f"engine format {plain['format_version']!r} (Stoker {plain.get('stoker_version')})"
        raise EngineError(
            f"{path} has {theirs}, and this Stoker {__version__} reads format {FORMAT_VERSION}.",
            cure="Build the engine again with this Stoker.",
        )
    return plain


def _parse(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise EngineError(f"{file} has more than {MAX_CONFIG_BYTES} bytes.", cure="Build the engine again.")
    try:
        plain = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise EngineError(f"{file} is not JSON ({problem}).", cure="Build the engine again.") from None
    if not isinstance(plain, dict):
        raise EngineError(f"{file} is not an object.", cure="Build the engine again.")
    return plain


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
