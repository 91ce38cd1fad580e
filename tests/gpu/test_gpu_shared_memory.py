"""CUDA shared memory of KServe clients: another process reads and writes an allocation through its IPC handle, with the real driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest

SIZE = 1 << 16
# Reads the first half of the region, checks it, writes the second half; then reports errors of wrong sizes and handles.
OTHER_PROCESS = """
import sys
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.shared_memory.cuda import OpenCudaRegion
from stoker.server.protocols.kserve.shared_memory.regions import CudaRegion
handle, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
region = OpenCudaRegion(CudaRegion(name="r", handle=handle, device_id=0, byte_size=size))
data = region.read(0, size // 2)
region.write(size // 2, data[::-1])
region.close()
for wrong, byte_size in ((handle, size + (1 << 30)), (b"x" * 64, size)):
    try:
        OpenCudaRegion(CudaRegion(name="r", handle=wrong, device_id=0, byte_size=byte_size))
    except TritonError as error:
        print(error.message)
print(data.hex())
"""


@pytest.fixture
def allocation() -> Iterator[tuple[ctypes.CDLL, ctypes.c_uint64, bytes]]:
    """(driver, address, IPC handle) of SIZE bytes on the first device."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    handle = (ctypes.c_byte * 64)()
    calls = [
        (driver.cuInit, ctypes.c_uint(0)),
        (driver.cuDeviceGet, ctypes.byref(device), ctypes.c_int(0)),
        (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
    ]
    for call, *arguments in calls:
        assert call(*arguments) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
    assert driver.cuIpcGetMemHandle(ctypes.byref(handle), address) == 0
    yield driver, address, bytes(handle)
    assert driver.cuMemFree_v2(address) == 0


def test_an_allocation_of_another_process(allocation: tuple[ctypes.CDLL, ctypes.c_uint64, bytes]) -> None:
    driver, address, handle = allocation
    data = bytes(range(256)) * (SIZE // 512)
    assert driver.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(len(data))) == 0
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, handle.hex(), str(SIZE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    too_large, not_a_handle, read = done.stdout.splitlines()
    assert bytes.fromhex(read) == data
    assert f"byte_size is {SIZE + (1 << 30)}" in too_large and "cuIpcOpenMemHandle_v2 returned CUDA_ERROR_" in not_a_handle
    written = ctypes.create_string_buffer(SIZE // 2)
    assert driver.cuMemcpyDtoH_v2(written, ctypes.c_uint64(address.value + SIZE // 2), ctypes.c_size_t(SIZE // 2)) == 0
    assert written.raw == data[::-1]
