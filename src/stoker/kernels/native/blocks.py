"""Weights in groups as blocks, which linears read faster than rows on processors with AVX512-VNNI: see blocks.h."""

from __future__ import annotations

import mmap
import threading
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import ABSENT, BLOCKING, CALL_ARGUMENTS, FLOAT32, TensorInfo, kernels, tensor_info
from stoker.kernels.native.linear import NativeWeight, pack_linear
from stoker.kernels.types import PLAIN

_BLOCK = 16  # rows: BLOCK in linear.h
_HUGE_PAGE = 2 << 20
_MAPPING = 16 * _HUGE_PAGE  # smaller weights share mappings of this size, because most weights of small models fill no huge page


def in_blocks(weight: PackedWeight, native: NativeWeight | None) -> PackedWeight:
    """The weight in the layout `blocks` if this processor's kernels read it, otherwise unchanged. `native`: its kernel argument, or None.

    The blocks are a copy, in memory of the process: processes that load one engine no longer share the pages of its file.
    """
    library, own = kernels(), None if native is None else pack_linear(native, None, PLAIN)
    if isinstance(library, str) or native is None or own is None:
        return weight
    arguments = CALL_ARGUMENTS(0, 0, 0, 0, 0, FLOAT32) + own.packed
    size = library.blocks(BLOCKING(library.fork, 1, 0) + arguments)
    if not size:
        return weight
    blocks = _allocate(-(-own.outputs // _BLOCK) * size).view(-1, size)
    library.blocks(BLOCKING(library.fork, torch.get_num_threads(), blocks.data_ptr()) + arguments)
    values = tensor_info(blocks)._replace(dtype=native.values.dtype)
    argument = native._replace(
        values=values,
        scale=_part(values, native.scale),
        zero=_part(values, native.zero),
        offset=_part(values, native.offset),
        blocks=(own.outputs, own.inputs),
    )
    return replace(weight, values=blocks, scale=None, zero=None, layout="blocks", shape=argument.blocks, device_data=argument)


def _part(blocks: TensorInfo, part: TensorInfo) -> TensorInfo:
    """An array that is part of the blocks. The kernels read its dtype and whether it is absent."""
    return ABSENT if part is ABSENT else ABSENT._replace(address=blocks.address, dtype=part.dtype)


class _Mapping(mmap.mmap):
    """Memory in huge pages, where the system has them. int4 [3072, 576] from memory takes 34 µs in huge pages and 45 µs in small ones."""

    used = 0  # bytes


_newest: weakref.ref[_Mapping] | None = None
_lock = threading.Lock()


def _allocate(size: int) -> Tensor:
    """uint8 [size], aligned to 64 bytes. A mapping is freed with the last tensor in it."""
    global _newest
    with _lock:
        mapping = None if _newest is None else _newest()
        if mapping is None or mapping.used + size > len(mapping):
            mapping = _Mapping(-1, max(-(-size // _HUGE_PAGE) * _HUGE_PAGE, _MAPPING), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            _newest = weakref.ref(mapping)
        start, mapping.used = mapping.used, -(-(mapping.used + size) // 64) * 64
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
