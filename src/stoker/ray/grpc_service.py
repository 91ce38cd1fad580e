"""The gRPC service that Ray Serve's proxies open: KServe's inference.GRPCInferenceService, with messages as bytes.

The classes of tritonclient's messages cannot be pickled, which Ray does between a proxy and the ingress.
"""

from __future__ import annotations

from typing import Any

SERVICE = "inference.GRPCInferenceService"
SERVICER = "stoker.ray.grpc_service.add_service"
STREAM = "ModelStreamInfer"
UNARY = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelConfig", "ModelStatistics",
    "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting",
    "LogSettings",
)  # fmt: skip


class Message(bytes):
    """A serialized response, in the form in which Ray Serve expects responses."""

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return bytes(self)


def add_service(servicer: Any, server: Any) -> None:
    """Ray Serve's hook (`grpc_servicer_functions`): register the methods, whose implementations Ray Serve replaces."""
    import grpc

    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in UNARY}
    handlers[STREAM] = grpc.stream_stream_rpc_method_handler(getattr(servicer, STREAM))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
