"""Tensors of requests and responses that are in shared memory: the parameters that name the region."""

from __future__ import annotations

import msgspec
import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Parameters
from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
from stoker.server.protocols.kserve.tensors import dtypes

REGION, SIZE, OFFSET = (f"shared_memory_{name}" for name in ("region", "byte_size", "offset"))


class Placement(msgspec.Struct, frozen=True):
    """`byte_size` bytes at `offset` of a registered region."""

    region: str
    offset: int
    byte_size: int

    def read(self, memory: SharedMemory) -> bytes:
        """The bytes of an input. Raises TritonError."""
        return memory.read(self.region, self.offset, self.byte_size)

    def write(self, memory: SharedMemory, output: str, array: np.ndarray) -> Parameters:
        """Store an output. Returns its parameters in the response. Raises TritonError if it is larger than the placement."""
        data = dtypes.to_raw(array)
        if len(data) > self.byte_size:
            raise TritonError(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should be at least "
                f"{len(data)} bytes to hold the results"
            )
        memory.write(self.region, self.offset, data)
        return {REGION: self.region, SIZE: len(data), **({OFFSET: self.offset} if self.offset else {})}


def read_placement(tensor: str, parameters: Parameters) -> Placement | None:
    """Where a tensor is, according to its parameters; None: not in shared memory. Raises TritonError for wrong parameters."""
    if REGION not in parameters:
        return None
    region, size, offset = parameters[REGION], parameters.get(SIZE, 0), parameters.get(OFFSET, 0)
    if not isinstance(region, str) or type(size) is not int or type(offset) is not int or size < 0 or offset < 0:
        text = f"{REGION} is a string, {SIZE} and {OFFSET} are whole numbers from 0"
        raise TritonError(f"Unable to parse the shared memory parameters of '{tensor[:80]}': {text}")
    return Placement(region, offset, size)
