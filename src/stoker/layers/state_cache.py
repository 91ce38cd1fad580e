"""The recurrent states of a rank: sizes, and one tensor that holds the states of all layers, so that a slot is copied at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stoker.core.forward_batch import LayerState
from stoker.core.model_config import ModelConfig, StateConfig
from stoker.kernels import ops

_ALIGN = 256  # bytes


class StateCache:
    """The states of `num_slots` slots. A slot has the states of all layers of this rank.

    `layers` has an entry for each of the rank's layers, None for a layer without a state.
    """

    def __init__(
        self, config: ModelConfig, layers: Iterable[int], tensor_parallel: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        states = [config.layers[i].state for i in layers]
        self.num_slots = num_slots
        slot_bytes = sum(_layer_bytes(state, tensor_parallel, dtype) for state in states if state is not None)
        self._storage = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=device)
        self.layers: list[LayerState | None] = []
        start = 0
        for state in states:
            if state is None:
                self.layers.append(None)
                continue
            conv, recurrent = _local_shapes(state, tensor_parallel)
            conv_bytes = _aligned(math.prod(conv) * dtype.itemsize)
            self.layers.append(LayerState(self._view(start, conv, dtype), self._view(start + conv_bytes, recurrent, torch.float32)))
            start += _layer_bytes(state, tensor_parallel, dtype)

    def copy(self, pairs: Tensor) -> None:
        """Copy the states of slot pairs[i, 0] to slot pairs[i, 1] for each i. `pairs`: int32 [N, 2] on the device; slots below 0 are
        counted from the end.

        No target is a source: sequences are saved to slots of snapshots, and restored to their rows.
        """
        ops.copy_states(self._storage, pairs.remainder(self.num_slots))

    def accept(self, tokens: Tensor, rows: Tensor) -> None:
        """Replace the states of rows that verified drafts, int32 [V] slots, by those after the last accepted token of each, int32 [V]."""
        self.copy(torch.stack((-1 - tokens, rows), dim=1))

    @contextmanager
    def around_step(self, restores: Tensor | None, saves: Tensor | None) -> Iterator[None]:
        """Copy `restores` before the step that the block runs, and `saves` after it; None: nothing to copy."""
        if restores is not None:
            self.copy(restores)
        yield
        if saves is not None:
            self.copy(saves)

    def _view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[slots, *shape] of `dtype` in the storage, from byte number `start` of each slot on."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._storage[:, start : start + num_bytes].view(dtype).unflatten(1, shape)


def state_bytes(config: ModelConfig, layers: Iterable[int], tensor_parallel: int, dtype: torch.dtype) -> int:
    """The bytes of one slot on one rank: the states of a sequence in all `layers` of the rank."""
    states = [config.layers[i].state for i in layers]
    return sum(_layer_bytes(state, tensor_parallel, dtype) for state in states if state is not None)


def _layer_bytes(state: StateConfig, tensor_parallel: int, dtype: torch.dtype) -> int:
    """The bytes of one slot of a layer."""
    conv, recurrent = _local_shapes(state, tensor_parallel)
    return _aligned(math.prod(conv) * dtype.itemsize) + _aligned(math.prod(recurrent) * torch.float32.itemsize)


def _local_shapes(state: StateConfig, tensor_parallel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the convolution's and of the recurrence's state of one sequence on one rank."""
    heads, *features = state.state_shape
    return (state.local_channels(tensor_parallel), state.kernel - 1), (heads // tensor_parallel, *features)


def _aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // _ALIGN) * _ALIGN
