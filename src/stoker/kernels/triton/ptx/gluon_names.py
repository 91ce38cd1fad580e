"""Functions of Gluon under their names since Triton 3.7, also with Triton 3.6."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_shared = gl.shared_memory_descriptor

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
