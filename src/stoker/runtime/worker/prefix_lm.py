"""Positions of tokens in prefix LMs: `core.prefix_lm.BidirectionalPrefix` for all tokens of a step."""

from __future__ import annotations

import numpy as np

from stoker.core.prefix_lm import BidirectionalPrefix


def fill_prefix_lm_positions(
    prefixes: list[BidirectionalPrefix], counts: np.ndarray, positions: np.ndarray, block_positions: np.ndarray, prefix_lens: np.ndarray
) -> None:
    """Fill block_positions [T] and prefix_lens [R], and change positions [T] from sequence indices to rotary positions.

    `prefixes`: one per row; `counts` [R]: the number of tokens of each row.
    """
    lengths, masks = np.array(prefixes, dtype=np.int32).T
    prefix_lens[:] = lengths
    length, mask = np.repeat(lengths, counts), np.repeat(masks, counts)
    np.maximum(positions - length + 1, 0, out=block_positions)
    np.copyto(positions, mask, where=positions >= length)
