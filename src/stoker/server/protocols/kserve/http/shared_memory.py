"""The endpoints of system and CUDA shared memory: register, status and unregister."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from stoker.server.http.json_body import INLINE_BYTES
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.protocol import Endpoint
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.http.json_body import read_object
from stoker.server.protocols.kserve.shared_memory.regions import CudaRegion, Region, SystemRegion
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory

T = TypeVar("T")
Refuse = Callable[[RequestContext, TritonError, bytes], Awaitable[None]]


class SharedMemoryEndpoints:
    """The endpoints under /v2/systemsharedmemory and /v2/cudasharedmemory."""

    def __init__(self, memory: SharedMemory, refuse: Refuse) -> None:
        self._memory = memory
        self._refuse = refuse

    def endpoints(self) -> list[Endpoint]:
        endpoints = []
        for kind in ("system", "cuda"):
            base = f"/v2/{kind}sharedmemory"
            for path in (base, base + "/region/{region}"):
                endpoints.append(Endpoint("GET", f"{path}/status", partial(self.status, kind)))
                endpoints.append(Endpoint("POST", f"{path}/unregister", partial(self.unregister, kind)))
            endpoints.append(Endpoint("POST", base + "/region/{region}/register", partial(self.register, kind)))
        return endpoints

    async def status(self, kind: str, http: RequestContext) -> None:
        """GET …/status: one region, or all if the path names none."""
        try:
            status = self._memory.status(kind, http.path.get("region", ""))
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200, msgspec.json.encode(status))

    async def unregister(self, kind: str, http: RequestContext) -> None:
        """POST …/unregister: one region, or all if the path names none."""
        await http.body(INLINE_BYTES)
        await self._memory.unregister(kind, http.path.get("region", ""))
        await http.respond(200)

    async def register(self, kind: str, http: RequestContext) -> None:
        """POST …/register: open the region of the body in all frontends."""
        try:
            body = read_object(await http.body(INLINE_BYTES))
            read_region = _read_system if kind == "system" else _read_cuda
            await self._memory.register(read_region(http.path["region"], body))
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200)


def _read_system(name: str, body: dict[str, Any]) -> Region:
    """The system region that the body describes. Raises TritonError for missing members and ones of a wrong type."""
    key, offset = _member(body, "key", str), _member(body, "offset", int, 0)
    return SystemRegion(name=name, key=key, offset=offset, byte_size=_member(body, "byte_size", int))


def _read_cuda(name: str, body: dict[str, Any]) -> Region:
    """The CUDA region that the body describes. Raises TritonError for missing members and a handle that is not base64."""
    text = _member(_member(body, "raw_handle", dict), "b64", str)
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise TritonError("Unable to parse 'raw_handle': 'b64' is not base64") from None
    return CudaRegion(name=name, handle=handle, device_id=_member(body, "device_id", int), byte_size=_member(body, "byte_size", int))


def _member(body: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """A member of the body. Raises TritonError if it has another type, or is missing and has no default."""
    value = body.get(name, default)
    if value is None:
        raise TritonError(f"Shared memory register request has no '{name}' field")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TritonError(f"Unable to parse '{name}': it must be {'a whole number' if kind is int else 'a string or an object'}")
    return value
