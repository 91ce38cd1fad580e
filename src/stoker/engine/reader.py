"""Opens an engine directory, and rejects an unusable one with a clear error before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from stoker.base.errors import EngineError
from stoker.base.json_object import read_bounded_object
from stoker.distributed.group import SINGLE, Group
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.engine.config import EngineConfig, decode_engine_config, rank_metadata
from stoker.engine.config_file import (
    CONFIG_FILE,
    COPY_OR_REBUILD,
    MAX_CONFIG_BYTES,
    REBUILD,
    check_files,
    engine_file,
    rank_file_name,
    read_engine_config,
)
from stoker.engine.file_record import file_sha256
from stoker.engine.safetensors_header import read_metadata
from stoker.engine.tensor_source import DummyTensorSource, FileTensorSource
from stoker.layers.loader import Loader
from stoker.quant.format import TensorSource

HUGGING_FACE_CONFIG_FILE = "hf_config.json"  # the config.json of the checkpoint, for `stoker export hf`


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
        engine = Engine(path, decode_engine_config(read_engine_config(path), path))
        check_files(path, engine.config.files, engine.world_size if engine.config.weights == "files" else 0)
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
        return engine_file(self.path, name)

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
                raise EngineError(f"{self.file(name)} is corrupt: {digests}.", cure=COPY_OR_REBUILD)

    def check_world(self, size: int) -> None:
        """Raise EngineError unless the engine was built for `size` ranks."""
        if size != self.world_size:
            raise EngineError(
                f"{self.path} was built for {self.config.mapping.ranks}, and {size} are running.",
                cure=f"Start {self.world_size}, or build with --tensor-parallel {size}.",
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
        found, expected = read_metadata(file, EngineError, COPY_OR_REBUILD), rank_metadata(self.config, rank)
        if found != expected:
            actual, wanted = (f"rank {m.get('rank')} of engine {m.get('engine', '')[:12]}" for m in (found, expected))
            raise EngineError(
                f"{file} is from another build or rank: its header says {actual}, and {wanted} is expected.", cure=COPY_OR_REBUILD
            )


def is_engine(path: str | Path) -> bool:
    """Whether the directory has the config.json of an engine. Other files are not checked."""
    try:
        return "format_version" in read_bounded_object(Path(path) / CONFIG_FILE, MAX_CONFIG_BYTES, EngineError, REBUILD)
    except (EngineError, OSError):
        return False
