"""Opens an engine directory, and rejects an unusable one with a clear error before any weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker import __version__
from stoker.base.errors import EngineError
from stoker.base.json_object import read_bounded_object
from stoker.distributed.group import SINGLE, Group
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.engine.config import FORMAT_VERSION, EngineConfig, decode_engine_config, rank_metadata
from stoker.engine.file_record import file_sha256
from stoker.engine.safetensors_header import read_metadata
from stoker.engine.tensor_source import DummyTensorSource, FileTensorSource
from stoker.layers.loader import Loader
from stoker.quant.format import TensorSource

CONFIG_FILE = "config.json"
HUGGING_FACE_CONFIG_FILE = "hf_config.json"  # the config.json of the checkpoint, for `stoker export hf`
MAX_CONFIG_BYTES = 64 << 20
_REBUILD = "Build the engine again."
_COPY_OR_REBUILD = "Copy the engine again, or build it again."


def rank_file_name(rank: int) -> str:
    """The name of the file with a rank's weights."""
    return f"rank{rank}.safetensors"


class Engine:
    """An opened engine directory. Its format version, files and file sizes have been checked."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.path = path
        self.config = config

    @staticmethod
    def open(path: str | Path, *, verify: bool = False, progress: Callable[[int, int], None] = lambda done, total: None) -> Engine:
        """Open a directory. `verify`: also read every file and compare its digest; `progress` receives (bytes done, total bytes).

        Raises EngineError when the directory is not an engine, has another format version, or is incomplete.
        """
        path = Path(path)
        engine = Engine(path, decode_engine_config(_read_config(path), path))
        engine._check_files()
        if verify:
            engine.verify(progress)
        return engine

    @property
    def world_size(self) -> int:
        """The number of ranks that the engine was built for."""
        return self.config.mapping.world_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of weights that are not quantized."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        dtype: torch.dtype = getattr(torch, self.config.recipe.kv_cache or self.config.dtype)
        return dtype

    def file(self, name: str) -> Path:
        """The path of a file that config.json lists. Rank files may also have the names of LMI's model repositories."""
        path = self.path / name
        if (rank := re.fullmatch(r"rank(\d+)\.safetensors", name)) and not path.exists():
            return next(self.path.glob(f"trt_llm_model_*_rank{rank[1]}.engine"), path)
        return path

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read every file. Raises EngineError naming the first one whose digest differs from the one that was written.

        `progress` receives (bytes done, total bytes).
        """
        done, total = 0, sum(record.size for record in self.config.files.values())

        def add(num_bytes: int) -> None:
            """Report more bytes that were read."""
            nonlocal done
            done += num_bytes
            progress(done, total)

        for name, record in self.config.files.items():
            found = file_sha256(self.file(name), add)
            if found != record.sha256:
                digests = f"its sha256 is {found[:12]}…, and {record.sha256[:12]}… was written"
                raise EngineError(f"{self.file(name)} is corrupt: {digests}.", cure=_COPY_OR_REBUILD)

    def check_world(self, size: int) -> None:
        """Raise EngineError unless the engine was built for `size` ranks."""
        if size != self.world_size:
            mapping = self.config.mapping
            ranks = f"{self.world_size} ranks ({mapping})"
            raise EngineError(
                f"{self.path} was built for {ranks}, and {size} are running.",
                cure=f"Start {self.world_size} ranks, or build with --tensor-parallel {size}.",
            )

    def check_device(self, device: torch.device) -> None:
        """Raise EngineError unless the engine was built for this kind of device, and for its compute capability."""
        target = self.config.target
        if device.type != target.device:
            cure = f"Run it on {target.device}, or build again with --device {device.type}."
            raise EngineError(f"{self.path} was built for {target.device}, and {device.type} was requested.", cure=cure)
        if device.type == "cuda" and target.compute_capability is not None:
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            if found != target.compute_capability:
                both = f"compute capability {target.compute_capability}, and this device has {found}"
                raise EngineError(f"{self.path} was built for {both}.", cure="Build the engine again on this device.")

    def source(self, rank: int = 0, device: torch.device | str = "cpu") -> TensorSource:
        """The source of a rank's stored tensors, which are loaded to `device`. Raises EngineError for a wrong device or rank file."""
        device = torch.device(device)
        self.check_device(device)
        if self.config.weights == "dummy":
            return DummyTensorSource(device)
        self.check_rank(rank)
        return FileTensorSource(self.file(rank_file_name(rank)), device)

    def loader(
        self, rank: int = 0, device: torch.device | str = "cpu", group: Group = SINGLE, dispatch: TokenDispatch | None = None
    ) -> Loader:
        """The loader of a rank's weights, with which `layers.decoder.Decoder` is created. `group`: the tensor-parallel ranks."""
        config, source = self.config, self.source(rank, device)
        return Loader(source, config.recipe, self.dtype, torch.device(device), group, config.sharding, dispatch=dispatch)

    def check_rank(self, rank: int) -> None:
        """Raise EngineError when the file of a rank belongs to another build, or to another rank."""
        if self.config.weights == "dummy":
            return
        file = self.file(rank_file_name(rank))
        found, expected = read_metadata(file, EngineError, _COPY_OR_REBUILD), rank_metadata(self.config, rank)
        if found != expected:
            actual, wanted = (f"rank {m.get('rank')} of engine {m.get('engine', '')[:12]}" for m in (found, expected))
            raise EngineError(
                f"{file} is from another build or rank: its header says {actual}, and {wanted} is expected.", cure=_COPY_OR_REBUILD
            )

    def _check_files(self) -> None:
        """Raise EngineError unless all files that config.json lists exist with the listed sizes."""
        for name, record in self.config.files.items():
            file = self.file(name)
            if Path(name).name != name:
                raise EngineError(f"{self.path}: config.json lists {name!r}, which is not a file name.", cure=_REBUILD)
            if not file.is_file():
                raise EngineError(f"{file} is missing.", cure=_COPY_OR_REBUILD)
            if (size := file.stat().st_size) != record.size:
                raise EngineError(
                    f"{file} is truncated or changed: it has {size} bytes, and {record.size} were written.", cure=_COPY_OR_REBUILD
                )
        if self.config.weights == "files":
            for rank in range(self.world_size):
                if rank_file_name(rank) not in self.config.files:
                    raise EngineError(f"{self.path}: config.json lists no {rank_file_name(rank)}.", cure=_REBUILD)


def is_engine(path: str | Path) -> bool:
    """Whether the directory has the config.json of an engine. Other files are not checked."""
    try:
        return "format_version" in read_bounded_object(Path(path) / CONFIG_FILE, MAX_CONFIG_BYTES, EngineError, _REBUILD)
    except (EngineError, OSError):
        return False


def _read_config(path: Path) -> dict[str, Any]:
    """The content of an engine's config.json. Raises EngineError for any other file and for another format version."""
    file = path / CONFIG_FILE
    build = f"Run: stoker build {path} -o ENGINE."
    if not file.is_file():
        if path.suffix == ".gguf" and path.is_file():
            raise EngineError(f"{path} is not an engine: it is a GGUF file.", cure=build)
        problem = f"it has no {CONFIG_FILE}" if path.is_dir() else "it does not exist"
        raise EngineError(f"{path} is not an engine: {problem}.", cure="Name a directory that stoker build wrote.")
    plain = read_bounded_object(file, MAX_CONFIG_BYTES, EngineError, _REBUILD)
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
