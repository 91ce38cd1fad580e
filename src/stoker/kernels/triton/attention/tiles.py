"""Chooses the tile of an attention launch, from the rows of the device's tuning table, and the number of splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.tuning.attention import AttentionRow
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.types import LONG_SPLIT, SHORT_SPLIT

# Of decode batches whose rows have unknown lengths, those that fill the device with at most RAGGED_TILES query tiles per SM are cut into
# splits of RAGGED_SPLIT tokens.
RAGGED_SPLIT = 1024
RAGGED_TILES = 3
RAGGED_CTAS = 32  # per SM: the largest grid for splits below LONG_SPLIT. CTAs of unused splits exit at once, but each has to be started
MAX_SPLITS = 64
MAX_DECODE_ROWS = 32  # of a decode tile
MAX_VERIFIED_ROWS = 64  # queries of a row with draft tokens that one tile holds
MAX_VERIFIED_HEAD = 256  # features of their heads


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The query rows × keys that one CTA multiplies at a time, and how Triton compiles it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Splits:
    """The CTAs that share the keys of one query tile. Each takes at least `min_tiles` key tiles."""

    count: int = 1
    min_tiles: int = 1
    by_lengths: bool = False  # each takes at least `ForwardBatch.split_tokens` keys instead, which are on the device


def decode_tile(
    head_size: int, dtype: torch.dtype, heads: int, num_tiles: int, num_sms: int, tuning: TuningTable, paired: bool = False
) -> AttentionTile:
    """The tile of a decode launch, for `heads` query heads of one token that share a KV head.

    `num_tiles` is the number of query tiles of the launch, without splits.

    Decode is bound by memory. On one H200 over 1,000 keys: 2 stages of 64 keys take 64.4 µs for 64 rows and 241 µs for 256 (3 stages: 73
    and 242; 4 stages of 32 keys: 67 and 246). With few tiles, a third stage shortens the chain of dependent loads. `paired` (an 8-bit
    cache, two features at once): 64 rows over 1,000 keys take 39.4 µs with 3 stages of 64, 47.6 with 2. More than three tiles per SM have a
    fourth stage, whose shared memory limits an SM to four CTAs, where five would fit by their registers: 64 and 128 rows take 38.9 and 73.9
    µs instead of 42.2 and 76.8. Over keys less means, whose registers let four fit anyway, three and four stages take 38.5 µs for 64 rows.

    CTAs of one warp never wait for another warp, and eight fit an SM, but their last wave lasts as long as the others: what counts is how
    full it is. 1,024 tiles (7.8 per SM) take 72 µs in one wave, where four warps take 82 in two; 1,536 tiles take 142 and 123, and 2,048
    131 and 146. Two warps, of which five CTAs fit, are best where four CTAs per SM do not suffice: 640 tiles take 47 µs, with four warps
    61 and with one 62 (benchmarks/results/h200_decode_tiles.json).
    """
    row = _first_match(tuning, "decode", _dtype_name(dtype, paired), head_size, heads, num_tiles, num_sms)
    return AttentionTile(min(MAX_DECODE_ROWS, max(16, next_power_of_2(heads))), row.block_n, row.num_warps, row.num_stages)


def decode_edges(num_sms: int, tuning: TuningTable) -> list[int]:
    """The numbers of query tiles at which a decode launch may be another kernel than for one fewer, in ascending order.

    `decode_tile` may return another tile there, or `choose_splits` fill the device with another number of splits.
    """
    rows = [row for row in tuning.attention if row.op == "decode"]
    above = {row.tiles_above * num_sms + 1 for row in rows if row.tiles_above is not None}
    below = {row.tiles_below * num_sms for row in rows if row.tiles_below is not None}
    return sorted(above | below | {(num_sms >> i) + 1 for i in range(num_sms.bit_length())})


def prefill_tile(
    head_size: int, dtype: torch.dtype, rows: int, num_tiles: int, num_sms: int, tuning: TuningTable, narrow: bool = False
) -> AttentionTile:
    """The tile for prefill rows. `rows`: the longest row's tokens × heads of a group; `num_tiles`: tiles of 128 rows in the launch;
    `narrow`: an 8-bit cache.

    On one H200, short prompts of 128 tokens with 32 / 8 heads take 6.4 µs in tiles of 16 rows and 14.6 in tiles of 64. With an 8-bit cache,
    4 prompts of 2,048 tokens take 462 µs over 128 keys at a time and 520 over 64.
    """
    if dtype != torch.float32 and (rows <= 16 or (4 * num_tiles <= num_sms and head_size <= 256)):
        return decode_tile(head_size, dtype, 16, num_tiles, num_sms, tuning)
    row = _first_match(tuning, "prefill", _dtype_name(dtype, narrow), head_size, rows, num_tiles, num_sms)
    assert row.block_m is not None
    return AttentionTile(row.block_m, row.block_n, row.num_warps, row.num_stages)


def verify_tile(
    head_size: int, dtype: torch.dtype, rows: int, num_tiles: int, num_sms: int, tuning: TuningTable, narrow: bool = False
) -> AttentionTile | None:
    """A tile that holds all `rows` queries of a row that verifies draft tokens (tokens × heads of a group), so that the row's keys are
    loaded once. None if there are too many, or for float32. The other parameters are those of `prefill_tile`.
    """
    if dtype == torch.float32 or rows > MAX_VERIFIED_ROWS or head_size > MAX_VERIFIED_HEAD:
        return None
    if rows <= 32:
        return decode_tile(head_size, dtype, rows, num_tiles, num_sms, tuning)
    row = _first_match(tuning, "prefill", _dtype_name(dtype, narrow), head_size, rows, num_tiles, num_sms)
    return AttentionTile(MAX_VERIFIED_ROWS, row.block_n, row.num_warps, row.num_stages)


def _first_match(tuning: TuningTable, op: str, dtype: str, head_size: int, rows: int, num_tiles: int, num_sms: int) -> AttentionRow:
    """The first row of the tuning table's attention rows that matches."""
    return next(row for row in tuning.attention if row.matches(op, dtype, head_size, rows, num_tiles, num_sms))


def _dtype_name(dtype: torch.dtype, narrow: bool) -> str:
    """The dtype's name in the tuning table. `narrow` means that the cache has 8 bits."""
    return "float32" if dtype == torch.float32 else "8-bit" if narrow else "16-bit"


def choose_splits(
    num_tiles: int, max_key_tiles: int, max_seq_len: int, num_sms: int, is_decode: bool = False, has_split_tokens: bool = False
) -> Splits:
    """The splits that fill the device when there are few query tiles, and that cut rows longer than LONG_SPLIT in any case.

    Filling means about one CTA per SM: with two, 8 rows over 1,000 keys took 20 µs instead of 14. `max_key_tiles` is the number of key
    tiles of a row of `max_seq_len` tokens. Shorter rows use fewer splits: each CTA computes its keys on the device, so that one captured
    launch serves every length up to the limit.

    With `is_decode`, batches that fill the device without splits may have rows that outlast the others: on one H200, a row of 4,000 FP8
    tokens beside 32 of 300 took 68 µs, in splits of 1,024 tokens 33, and of 512 tokens 24. Rows of equal lengths must not be cut, because
    results of splits have to be combined: a step of 64 rows of 1,100 tokens took 4.86 ms in splits of 1,024 tokens, and 4.53 without. With
    `has_split_tokens`, the length of splits is therefore chosen in each step (`runtime.worker.split_length`), and the grid has room for
    SHORT_SPLIT. Without, small batches are cut from RAGGED_SPLIT tokens on.
    """
    fill = min(1 << max(0, (num_sms // num_tiles).bit_length() - 1), _power_of_2(max_key_tiles), MAX_SPLITS)
    by_lengths = is_decode and has_split_tokens and fill == 1
    longest = SHORT_SPLIT if by_lengths else LONG_SPLIT
    if is_decode and not has_split_tokens and fill == 1 and num_tiles <= RAGGED_TILES * num_sms:
        longest = RAGGED_SPLIT
    while longest < LONG_SPLIT and num_tiles * _power_of_2(cdiv(max_seq_len, longest)) > RAGGED_CTAS * num_sms:
        longest *= 2
    count = min(_power_of_2(cdiv(max_seq_len, longest)), MAX_SPLITS)
    if fill >= count:
        return Splits(fill, 1)
    return Splits(count, max(1, cdiv(max_key_tiles * longest, max_seq_len) // (4 * fill if fill > 1 else 1)), by_lengths)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return next_power_of_2(max(1, n))
