"""Tiles of the tokens of ragged rows, whose lengths only the device knows: no tile has tokens of two rows.

    tiles     | row 0: 0 1 2 | row 1: 0 1 | row 2: 0 1 2 3 | unused |        row r starts at (tokens before r) // tokens per tile + r

Rows have at most one tile that is not used, so that the host knows an upper bound of tiles from the numbers of tokens and rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def num_token_tiles(query_starts_ptr, first_row, num_rows, TOKENS: tl.constexpr):
    """An upper bound of the tiles of rows first_row : num_rows: the end of those of the last row. Rows before have one token each."""
    return (tl.load(query_starts_ptr + num_rows) - first_row) // TOKENS + num_rows - first_row


@triton.jit
def find_row(tile, query_starts_ptr, first_row, num_rows, TOKENS: tl.constexpr):
    """(row, index of the tile within the row) of tile `tile` of rows first_row : num_rows, by binary search.

    Row r's tiles start at (tokens before r) // TOKENS + (rows before r), which is never before the end of row r - 1's tiles. Rows before
    first_row have one token each.
    """
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_starts_ptr + middle) - first_row) // TOKENS + middle - first_row
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low, tile - ((tl.load(query_starts_ptr + low) - first_row) // TOKENS + low - first_row)
