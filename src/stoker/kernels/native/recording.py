"""Short steps as recorded calls of C kernels, which are replayed with one call: what a CUDA graph is on a GPU.

A step of a small model is dozens of calls, and the Python code between them (views, checks, packed arguments) takes as long as half of the
kernels. It computes the same for each step of a shape, except the addresses of the step's inputs and of new tensors. A recording keeps both
constant: inputs are copied to tensors of its own, and tensors that the step allocates are in buffers of its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.native.library import CALL, REPLAY, Call, kernels, load_kernels, recorded_calls
from stoker.kernels.reference.attention import step_value

Layers = Callable[[Tensor, ForwardBatch, list[KVCache]], Tensor]
Shape = tuple[Any, ...]

_END = CALL(0, 0)
_MIN_WIDTH = 16  # of block tables
_MAX_SHAPES = 64  # of which recordings are kept
_aten = torch.ops.aten


@dataclass(slots=True)
class Recording:
    """The calls of a step of one shape, and the tensors that they read and write."""

    x: Tensor
    batch: ForwardBatch
    result: Tensor
    calls: bytes  # the argument of `replay`
    buffers: list[Tensor]

    def run(self, x: Tensor, batch: ForwardBatch) -> Tensor | None:
        """The result for another step of the shape, or None when a kernel does not support its indices."""
        library, own = kernels(), self.batch
        assert not isinstance(library, str)
        self.x.copy_(x)
        own.positions.copy_(batch.positions)
        own.slots.copy_(batch.slots)
        own.seq_lens.copy_(batch.seq_lens)
        own.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        return None if library.replay(self.calls) else self.result.clone()


class Recordings:
    """The recordings of a function that computes layers from x [T, hidden], a step, and the caches of the layers.

    A shape is recorded when it comes a second time with the same list of caches, whose tensors are never replaced.
    """

    def __init__(self) -> None:
        self._caches: list[KVCache] = []
        self._recordings: dict[Shape, Recording | None] = {}  # None: the shape can't be recorded
        self._seen: set[Shape] = set()

    def run(self, layers: Layers, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        """layers(x, batch, caches), by the recording of the step's shape if there is one."""
        if batch.tree is not None or batch.prefix_lens is not None:
            return layers(x, batch, caches)
        if caches is not self._caches or len(self._seen) > _MAX_SHAPES:
            self._caches, self._recordings, self._seen = caches, {}, set()
        width = _table_width(batch)
        # In a decode step, each row has one token. Of other steps, the kernels read the tokens of each row from Python, so they are fixed.
        starts = None if batch.is_decode else tuple(step_value(batch, "starts", batch.query_starts.tolist))
        # Tensors of inference mode can't be written outside of it.
        shape = x.shape, x.dtype, width, starts, batch.num_decodes, torch.get_num_threads(), torch.is_inference_mode_enabled()
        if shape not in self._seen:
            self._seen.add(shape)
            return layers(x, batch, caches)
        if shape not in self._recordings:
            self._recordings[shape] = record(layers, x, batch, caches, width)
        recording = self._recordings[shape]
        y = None if recording is None else recording.run(x, batch)
        return layers(x, batch, caches) if y is None else y


def _table_width(batch: ForwardBatch) -> int:
    """Entries of a row of the block table in the recording of a step: the next power of two, so that few lengths have one of their own."""
    return max(1 << (batch.block_tables.shape[1] - 1).bit_length(), _MIN_WIDTH)


def record(layers: Layers, x: Tensor, batch: ForwardBatch, caches: list[KVCache], width: int) -> Recording | None:
    """Run the layers for a copy of the inputs and record the calls of kernels.

    None when they also run other operations than these, because of the model or because a kernel does not support its arguments.
    """
    tables = batch.block_tables.new_zeros(batch.num_rows, width)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    x = x.clone()
    # Of the other tensors, `query_starts` and the shape of `token_ids` are the same in all steps of a shape.
    own = dataclasses.replace(
        batch,
        positions=batch.positions.clone(),
        slots=batch.slots.clone(),
        seq_lens=batch.seq_lens.clone(),
        block_tables=tables,
        logits_idx=None,
        state_slots=None,
        shared={},
    )
    calls: list[Call] = []
    with recorded_calls(calls), _OnlyKernels() as operations:
        result = layers(x, own, caches)
    if not operations.are_recorded:
        return None
    library = load_kernels()
    assert not isinstance(library, str)
    header = REPLAY(library.fork, torch.get_num_threads())
    packed = header + b"".join(CALL(call.address, len(call.arguments)) + call.arguments for call in calls) + _END
    return Recording(x, own, result, packed, operations.buffers)


class _OnlyKernels(TorchDispatchMode):
    """Allocates the tensors of the block in buffers that outlive it, and finds out whether it runs operations that are no kernels.

    A tensor that no longer exists leaves its buffer to later ones of its size, so that layers share buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.are_recorded = True
        self.buffers: list[Tensor] = []
        self._free: dict[int, list[np.ndarray]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch does not import its compiler, which is not used, for the first recording. That takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation, or replace it by `_allocate`."""
        if func is _aten.empty.memory_format:
            return self._allocate(torch.Size(args[0]), (kwargs or {}).get("dtype") or torch.get_default_dtype())
        if func is _aten.empty_like.default:
            return self._allocate(args[0].shape, args[0].dtype)
        self.are_recorded = self.are_recorded and func.is_view
        return func(*args, **kwargs or {})

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in a free buffer, or in a new one."""
        size = max(shape.numel() * dtype.itemsize, 1)
        free = self._free.setdefault(size, [])
        if not free:
            self.buffers.append(torch.empty(size, dtype=torch.uint8))
            free.append(self.buffers[-1].numpy())
        buffer = free.pop()
        owned = buffer[:]  # an array object of its own, which the tensor's storage holds
        weakref.finalize(owned, free.append, buffer).atexit = False
        return torch.from_numpy(owned)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
