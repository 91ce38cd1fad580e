"""CUDA shared memory: allocations of other processes, opened by their IPC handle with the driver library, without torch.

The primary context of a device is created in each frontend when the first region of the device is registered. It occupies a few hundred
MB of device memory until the server ends.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.shared_memory.regions import HANDLE_BYTES, CudaRegion, OpenRegion

LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class OpenCudaRegion(OpenRegion):
    """An allocation that is mapped into this process. Raises TritonError without a GPU, and for a handle that cannot be opened."""

    def __init__(self, region: CudaRegion) -> None:
        self._region = region
        self._address = ctypes.c_uint64()
        self._context = _primary_context(region.device_id)
        handle = _IpcHandle((ctypes.c_byte * HANDLE_BYTES).from_buffer_copy(region.handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        try:
            self._check_size()
        except TritonError:
            self.close()
            raise

    def read(self, offset: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(self._address.value + offset), ctypes.c_size_t(size))
        return buffer.raw

    def write(self, offset: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self._address.value + offset), data, ctypes.c_size_t(len(data)))

    def close(self) -> None:
        self._call("cuIpcCloseMemHandle", self._address)

    def _check_size(self) -> None:
        """Raise TritonError if the allocation is smaller than the region."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._address)
        left = base.value + size.value - self._address.value
        if left < self._region.byte_size:
            raise TritonError(
                f"failed to register CUDA shared memory region '{self._region.name}': the allocation has {left} bytes, and byte_size is "
                f"{self._region.byte_size}"
            )

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver in the context of the region's GPU. Raises TritonError if it fails."""
        _call("cuCtxSetCurrent", self._context, region=self._region.name)
        _call(name, *arguments, region=self._region.name)


@cache
def _primary_context(device_id: int) -> ctypes.c_void_p:
    """The primary context of a device, which is retained until the process ends. Raises TritonError if there is no such device."""
    place = f"cuda:{device_id}"
    _call("cuInit", ctypes.c_uint(0), region=place)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_id), region=place)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, region=place)
    return context


def _call(name: str, *arguments: Any, region: str) -> None:
    """Call a function of the driver. Raises TritonError with the driver's name of the error."""
    library = _driver()
    if (status := getattr(library, name)(*arguments)) != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise TritonError(f"failed to use CUDA shared memory region '{region}': {name} returned {reason}")


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver library. Raises TritonError if it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise TritonError(
            f"CUDA shared memory needs a GPU, and this server's machine has no {LIBRARY}. Use system shared memory."
        ) from None
