"""Where the tokens of prefix language models sit: `layers.prefix.BidirectionalPrefix` for all tokens of a step at once."""

from __future__ import annotations

import numpy as np

from stoker.core.prefix_lm import BidirectionalPrefix


def fill_prefix_lm_positions(
    prefixes: list[BidirectionalPrefix], counts: np.ndarray, positions: np.ndarray, block_positions: np.ndarray, prefix_lens: np.ndarray
) -> None:
    """Fill block_positions [T] and prefix_lens [R], and move positions [T], which hold the tokens' indices in their sequences.

    prefixes: one a row; counts [R]: each row's tokens.
    """
    lengths, masks = np.array(prefixes, dtype=np.int32).T
    prefix_lens[:] = lengths
    length, mask = np.repeat(lengths, counts), np.repeat(masks, counts)
    np.maximum(positions - length + 1, 0, out=block_positions)
    np.copyto(positions, mask, where=positions >= length)
