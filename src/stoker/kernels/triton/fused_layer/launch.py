"""A layer's tail in one launch: for a few tokens (`tail_few`), and for some against int4 (`tail_rows`)."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.quantized import Tail
from stoker.kernels.triton.fused_layer.large_batch import launch as tail_rows
from stoker.kernels.triton.fused_layer.small_batch import launch as tail_few


def takes_tail(tail: Tail, rows: int) -> bool:
    """See `ops.takes_tail`."""
    return tail_few.are_alike(tail) and (tail_rows.takes(tail, rows) or tail_few.takes(tail, rows))


def tail(x: Tensor, stream: Tensor, parts: Tail) -> tuple[Tensor, Tensor | None]:
    """See `ops.tail`."""
    assert x.is_contiguous() and stream.is_contiguous()
    return (tail_rows.tail_rows if tail_rows.takes(parts, x.shape[0]) else tail_few.tail_few)(x, stream, parts)
