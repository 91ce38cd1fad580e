"""A layer's tail in one launch: for a few tokens (`tail_few`), and for some against int4 (`tail_rows`)."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.quantized import Tail
from stoker.kernels.triton import tail_few, tail_rows


def takes_tail(tail: Tail, rows: int) -> bool:
    """See `ops.takes_tail`."""
    if not tail_few.are_alike(tail):
        return False
    return tail_few.takes(tail, rows) if rows <= tail_few.MOST else tail_rows.takes(tail, rows)


def tail(x: Tensor, stream: Tensor, parts: Tail) -> tuple[Tensor, Tensor | None]:
    """See `ops.tail`."""
    assert x.is_contiguous() and stream.is_contiguous()
    return (tail_few.tail_few if x.shape[0] <= tail_few.MOST else tail_rows.tail_rows)(x, stream, parts)
