"""A layer's tail, one linear after another."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.kernels.quantized import Tail


def takes_tail(tail: Tail, rows: int) -> bool:
    return False  # nothing is gained by it


def tail(x: Tensor, stream: Tensor, parts: Tail) -> tuple[Tensor, Tensor | None]:
    stream = parts.out.alone(x, replace(parts.out.fusion, residual=stream))
    inner = parts.up.alone(stream, parts.up.fusion)
    stream = parts.down.alone(inner, replace(parts.down.fusion, residual=stream))
    return stream, None if parts.qkv is None else parts.qkv.alone(stream, parts.qkv.fusion)
