"""The registered shared memory regions: the same in all frontends, each of which opens them itself."""

from __future__ import annotations

from typing import Any, TypeVar

from stoker.base.logging import get_logger
from stoker.server.coordination import Values
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.shared_memory.cuda import OpenCudaRegion
from stoker.server.protocols.kserve.shared_memory.regions import CudaRegion, OpenRegion, Region, SystemRegion, check_region
from stoker.server.protocols.kserve.shared_memory.system import OpenSystemRegion

log = get_logger(__name__)

PREFIX = "shared_memory/"  # of names in the coordination
MAX_REGIONS = 1024
KINDS: dict[str, type[Region]] = {"system": SystemRegion, "cuda": CudaRegion}

R = TypeVar("R", SystemRegion, CudaRegion)


class SharedMemory:
    """Registers regions that the setting `shared_memory` allows, and copies tensors from and to them.

    `max_bytes` limits one tensor, because a tensor in shared memory is part of a request, too.
    """

    def __init__(self, context: Context) -> None:
        self._coordination = context.coordination
        self._allowed = context.settings.shared_memory
        self._max_bytes = context.settings.max_request_bytes
        self._open: dict[str, OpenRegion | TritonError] = {}
        self._coordination.on_change(self._apply)

    async def register(self, region: Region) -> None:
        """Register a region. Returns when all frontends have opened it.

        Raises TritonError if it is not allowed, cannot be opened, or its name is in use.
        """
        check_region(region, self._allowed)
        if sum(name.startswith(PREFIX) for name in self._coordination.values) >= MAX_REGIONS:
            raise TritonError(f"{MAX_REGIONS} shared memory regions are registered, which is the limit. Unregister some.")
        _open_region(region).close()
        if not await self._coordination.put(PREFIX + region.name, region):
            raise TritonError(f"shared memory region '{region.name}' already in manager", 409)

    async def unregister(self, kind: str, name: str) -> None:
        """Unregister a region, or with an empty name all regions of a kind. Does nothing if there is none."""
        for region in self.regions(kind):
            if name in ("", region.name):
                await self._coordination.remove(PREFIX + region.name)

    def regions(self, kind: str) -> list[Region]:
        """The registered regions of this kind, system or cuda, by name."""
        found = [(name, region) for name, region in self._coordination.values.items() if name.startswith(PREFIX)]
        return [region for _, region in sorted(found) if isinstance(region, KINDS[kind])]

    def status(self, kind: str, name: str) -> list[dict[str, Any]]:
        """The status of one region, or with an empty name of all. Raises TritonError for an unknown one."""
        found = [region.status() for region in self.regions(kind) if name in ("", region.name)]
        if name and not found:
            raise TritonError(f"Unable to find {kind} shared memory region: '{name[:80]}'", 404)
        return found

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a region. Raises TritonError for an unknown region and a range outside of it."""
        return self._region(name, offset, size).read(offset, size)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Store bytes in a region. Raises TritonError for an unknown region and a range outside of it."""
        self._region(name, offset, len(data)).write(offset, data)

    def check_range(self, name: str, offset: int, size: int) -> None:
        """Raise TritonError unless `size` bytes at `offset` can be used."""
        self._region(name, offset, size)

    def close(self) -> None:
        """Close all regions of this process."""
        for region in self._open.values():
            if isinstance(region, OpenRegion):
                region.close()
        self._open.clear()

    def _region(self, name: str, offset: int, size: int) -> OpenRegion:
        """The open region, after a check that it contains this range. Raises TritonError, also if this process could not open it."""
        region, opened = self._coordination.values.get(PREFIX + name), self._open.get(name)
        if region is None or opened is None:
            raise TritonError(f"Unable to find shared memory region: '{name[:80]}'")
        if isinstance(opened, TritonError):
            raise opened
        if not 0 <= offset <= offset + size <= region.byte_size:
            raise TritonError(
                f"Invalid offset + byte size for shared memory region: '{name[:80]}': offset {offset} and byte size {size} exceed its "
                f"{region.byte_size} bytes"
            )
        if size > self._max_bytes:
            raise TritonError(
                f"a tensor in shared memory region '{name[:80]}' has {size} bytes, and max_request_bytes is {self._max_bytes}", 413
            )
        return opened

    async def _apply(self, changes: Values) -> None:
        """Open added regions and close removed ones. A region that cannot be opened raises its error when it is used."""
        for key, region in changes.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if isinstance(opened := self._open.pop(name, None), OpenRegion):
                opened.close()
            if region is not None:
                try:
                    self._open[name] = _open_region(region)
                except TritonError as error:
                    log.warning("%s", error)
                    self._open[name] = error


def _open_region(region: Region) -> OpenRegion:
    """Open a region in this process. Raises TritonError."""
    return OpenSystemRegion(region) if isinstance(region, SystemRegion) else OpenCudaRegion(region)
