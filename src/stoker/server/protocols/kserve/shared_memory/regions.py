"""The description of a shared memory region, which all frontends have, and the interface of an open one."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import msgspec

from stoker.server.protocols.kserve.errors import TritonError

MAX_NAME_CHARS = 256
MAX_BYTES = 1 << 40
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
RESERVED = "triton_python_backend_shm_region_"  # in keys of Triton's own regions


class SystemRegion(msgspec.Struct, frozen=True, kw_only=True):
    """`byte_size` bytes at `offset` of the POSIX shared memory object `key`, which shm_open would open."""

    name: str
    key: str
    offset: int
    byte_size: int

    @property
    def place(self) -> str:
        """The text that a pattern of --shared-memory must match to allow this region."""
        return self.key

    def status(self) -> dict[str, Any]:
        """The region in Triton's status format."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


class CudaRegion(msgspec.Struct, frozen=True, kw_only=True):
    """`byte_size` bytes of the CUDA allocation of a cudaIpcMemHandle_t."""

    name: str
    handle: bytes
    device_id: int
    byte_size: int

    @property
    def place(self) -> str:
        """The text that a pattern of --shared-memory must match to allow this region."""
        return f"cuda:{self.device_id}"

    def status(self) -> dict[str, Any]:
        """The region in Triton's status format, which omits the handle."""
        return {"name": self.name, "device_id": self.device_id, "byte_size": self.byte_size}


Region: TypeAlias = SystemRegion | CudaRegion


class OpenRegion(ABC):
    """A region that this process has opened. Ranges are within the region; the caller checks them."""

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """The bytes of a range. Raises TritonError if the memory is gone or has shrunk."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Store bytes in a range. Raises TritonError if the memory is gone or has shrunk."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


def check_region(region: Region, allowed: tuple[str, ...]) -> None:
    """Raise TritonError for values out of range, and for a region that no pattern of --shared-memory allows."""
    if not 0 < len(region.name) <= MAX_NAME_CHARS:
        raise TritonError(f"a shared memory region has a name of 1 to {MAX_NAME_CHARS} characters, and this one has {len(region.name)}")
    if not 0 < region.byte_size <= MAX_BYTES:
        raise TritonError(f"byte_size of shared memory region '{region.name}' is {region.byte_size}; it must be from 1 to {MAX_BYTES}")
    if isinstance(region, SystemRegion):
        _check_key(region)
    elif len(region.handle) != HANDLE_BYTES or not 0 <= region.device_id < 1024:
        limits = f"a handle has {HANDLE_BYTES} bytes, and device_id is from 0 to 1023"
        raise TritonError(f"failed to register shared memory region '{region.name}': {limits}")
    if not any(fnmatch.fnmatchcase(region.place, pattern) for pattern in allowed):
        cure = f"Start it with --shared-memory '{region.place[:80]}', or a pattern of such names."
        raise TritonError(f"the server does not allow the shared memory '{region.place[:80]}'. {cure}")


def _check_key(region: SystemRegion) -> None:
    """Raise TritonError for a key that is not the name of one file in /dev/shm or is reserved for Stoker, and for a bad offset."""
    name = region.key.removeprefix("/")
    if not name or len(name) > MAX_NAME_CHARS or "/" in name or "\0" in name or name in (".", ".."):
        raise TritonError(f"Unable to open shared memory region: '{region.key[:80]}': a key is a slash and a name without slashes")
    if RESERVED in name:
        raise TritonError(
            f"cannot register shared memory region '{region.name}' with key '{region.key[:80]}' as the key contains the reserved "
            f"prefix '{RESERVED}'"
        )
    if not 0 <= region.offset <= MAX_BYTES:
        raise TritonError(f"offset of shared memory region '{region.name}' is {region.offset}; it must be from 0 to {MAX_BYTES}")
