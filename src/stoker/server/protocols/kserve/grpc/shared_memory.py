"""The methods of system and CUDA shared memory over gRPC: register, status and unregister."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from stoker.server.protocols.kserve.shared_memory.regions import CudaRegion, SystemRegion
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory


class SharedMemoryMethods:
    """The six methods of the service."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def methods(self) -> dict[str, tuple[Any, Any, Any]]:
        """(handler, type of the request, type of the response) by name."""
        return {
            "SystemSharedMemoryStatus": (self.system_status, pb.SystemSharedMemoryStatusRequest, pb.SystemSharedMemoryStatusResponse),
            "CudaSharedMemoryStatus": (self.cuda_status, pb.CudaSharedMemoryStatusRequest, pb.CudaSharedMemoryStatusResponse),
            "SystemSharedMemoryRegister": (
                self.register_system,
                pb.SystemSharedMemoryRegisterRequest,
                pb.SystemSharedMemoryRegisterResponse,
            ),
            "CudaSharedMemoryRegister": (self.register_cuda, pb.CudaSharedMemoryRegisterRequest, pb.CudaSharedMemoryRegisterResponse),
            "SystemSharedMemoryUnregister": (
                self.unregister_system,
                pb.SystemSharedMemoryUnregisterRequest,
                pb.SystemSharedMemoryUnregisterResponse,
            ),
            "CudaSharedMemoryUnregister": (
                self.unregister_cuda,
                pb.CudaSharedMemoryUnregisterRequest,
                pb.CudaSharedMemoryUnregisterResponse,
            ),
        }

    async def system_status(self, request: Any, context: Any) -> Any:
        """SystemSharedMemoryStatus: one region, or all if the request names none."""
        status = {region["name"]: region for region in self._memory.status("system", request.name)}
        types = pb.SystemSharedMemoryStatusResponse
        return types(regions={name: types.RegionStatus(**region) for name, region in status.items()})

    async def cuda_status(self, request: Any, context: Any) -> Any:
        """CudaSharedMemoryStatus: one region, or all if the request names none."""
        status = {region["name"]: region for region in self._memory.status("cuda", request.name)}
        types = pb.CudaSharedMemoryStatusResponse
        return types(regions={name: types.RegionStatus(**region) for name, region in status.items()})

    async def register_system(self, request: Any, context: Any) -> Any:
        """SystemSharedMemoryRegister: open the region in all frontends. Raises TritonError as `SharedMemory.register` does."""
        region = SystemRegion(name=request.name, key=request.key, offset=request.offset, byte_size=request.byte_size)
        await self._memory.register(region)
        return pb.SystemSharedMemoryRegisterResponse()

    async def register_cuda(self, request: Any, context: Any) -> Any:
        """CudaSharedMemoryRegister: open the region in all frontends. Raises TritonError as `SharedMemory.register` does."""
        handle = request.raw_handle
        await self._memory.register(CudaRegion(name=request.name, handle=handle, device_id=request.device_id, byte_size=request.byte_size))
        return pb.CudaSharedMemoryRegisterResponse()

    async def unregister_system(self, request: Any, context: Any) -> Any:
        """SystemSharedMemoryUnregister: one region, or all if the request names none."""
        await self._memory.unregister("system", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def unregister_cuda(self, request: Any, context: Any) -> Any:
        """CudaSharedMemoryUnregister: one region, or all if the request names none."""
        await self._memory.unregister("cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()
