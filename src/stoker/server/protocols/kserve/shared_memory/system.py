"""System shared memory: POSIX shared memory objects, which are files in /dev/shm.

The file is read and written with pread and pwrite and not mapped: a client can truncate it at any time, and an access to a page of a
mapping that no longer exists would end the process (SIGBUS).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.shared_memory.regions import OpenRegion, SystemRegion

FOLDER = Path("/dev/shm")


class OpenSystemRegion(OpenRegion):
    """An open shared memory object. Raises TritonError if it does not exist or is smaller than the region."""

    def __init__(self, region: SystemRegion) -> None:
        self._region = region
        try:
            self._descriptor = os.open(FOLDER / region.key.removeprefix("/"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TritonError(f"Unable to open shared memory region: '{region.key[:80]}': {error.strerror}") from None
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < region.offset + region.byte_size:
            self.close()
            problem = f"it has {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "it is not a file"
            raise TritonError(
                f"failed to register shared memory region '{region.name}': invalid args. offset {region.offset} and byte_size "
                f"{region.byte_size} are beyond the end of '{region.key[:80]}': {problem}"
            )

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, self._region.offset + offset)
        if len(data) != size:
            raise self._shrunk()
        return data

    def write(self, offset: int, data: bytes) -> None:
        at = self._region.offset + offset
        if os.fstat(self._descriptor).st_size < at + len(data):  # pwrite would make the file longer
            raise self._shrunk()
        os.pwrite(self._descriptor, data, at)

    def close(self) -> None:
        os.close(self._descriptor)

    def _shrunk(self) -> TritonError:
        """The error for an object that has become smaller since it was registered."""
        return TritonError(f"shared memory region '{self._region.name}' has become smaller than {self._region.byte_size} bytes")
