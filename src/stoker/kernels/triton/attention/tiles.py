"""Which tile and how many splits an attention launch uses: all that tuning on a device may change, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

LONG_SPLIT = 8192  # tokens: a split of a longer row is cut again, lest one row's programs outlast the rest of the batch
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries × keys of one program, and how Triton compiles it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    bulk_copy: bool = False  # prefill: pages arrive through the tensor memory accelerator where the cache's layout allows


@dataclass(frozen=True, slots=True)
class Splits:
    """Programs that share one tile's keys; a split takes at least `min_tiles` key tiles."""

    count: int = 1
    min_tiles: int = 1


def decode_tile(head_size: int, dtype: torch.dtype, heads: int, programs: int, num_sms: int, paired: bool = False) -> Tile:
    """The tile for one token's `heads` that share a key head; `programs` = tiles of the launch before splitting.

    Decode is bound by memory. Few programs: a whole block a tile, for the shortest chain of dependent loads, 3 stages deep. Many:
    measured on one H200 over 1,000 keys, 2 stages of 64 take 64 rows in 64.4 µs and 256 in 241 (3 stages: 73 and 242; 32 × 4: 67 and 246).
    `paired` (an 8-bit cache's features, two at once): 64 rows over 1,000 keys take 39.4 µs with 3 stages of 64, 47.6 with 2; 512 rows over
    1,500 keys 430 µs with those, and 407 where each warp is a program, which never waits for another.
    """
    block_m = min(32, max(16, triton.next_power_of_2(heads)))
    if head_size > 256:
        return Tile(block_m, 16 if dtype == torch.float32 else 32, 8, 2)
    if dtype == torch.float32:
        return Tile(block_m, 16 if head_size > 128 else 32, 4, 2)
    if head_size > 128:
        return Tile(block_m, 32, 4, 3)
    if paired:
        return Tile(block_m, 32, 1, 3) if programs > 8 * num_sms and block_m == 16 else Tile(block_m, 64, 4, 3)
    return Tile(block_m, 64, 4, 3 if programs < 2 * num_sms else 2)


def prefill_tile(head_size: int, dtype: torch.dtype, rows: int, programs: int, num_sms: int, narrow: bool = False) -> Tile:
    """The tile for ragged queries: `rows` = longest row's tokens × heads of a group, `programs` = tiles of 128 rows in the launch."""
    if dtype == torch.float32:
        return Tile(16, 16, 4, 2) if head_size > 128 else Tile(32, 32, 4, 2)
    # Short prompts: 128 tokens of 32 / 8 heads take 6.4 µs in tiles of 16 rows, 14.6 in tiles of 64.
    if rows <= 16 or (4 * programs <= num_sms and head_size <= 256):
        return decode_tile(head_size, dtype, 16, programs, num_sms)
    if head_size > 256:
        return Tile(64, 32, 8, 2)
    few = rows <= 64 or programs < num_sms
    if head_size > 192:
        return Tile(64, 32, 4, 2) if few else Tile(128, 32, 8, 3)
    if narrow and not few and head_size <= 128:  # a cache of 8 bits: 4 prompts of 2,048 tokens take 462 µs, 520 over 64 keys at a time
        return Tile(128, 128, 8, 2)
    return Tile(64, 64, 4, 2) if few else Tile(128, 64, 8, 2 if head_size > 128 else 3)


def choose_splits(programs: int, max_tiles: int, max_seq_len: int, num_sms: int) -> Splits:
    """Fill the device when programs are few (one a multiprocessor: with two, 8 rows over 1,000 keys took 20 µs instead of 14), and cut
    rows longer than LONG_SPLIT in any case.

    `max_tiles` key tiles in the longest row possible. Rows shorter than the bound use fewer splits: each kernel program finds its row's
    share on the device, so that one captured launch serves every length under the bound.
    """
    fill = min(1 << max(0, (num_sms // programs).bit_length() - 1), _power(max_tiles), MAX_SPLITS)
    long = min(_power(triton.cdiv(max_seq_len, LONG_SPLIT)), MAX_SPLITS)
    if fill >= long:
        return Splits(fill, 1)
    return Splits(long, max(1, triton.cdiv(max_tiles * LONG_SPLIT, max_seq_len) // (4 * fill if fill > 1 else 1)))


def _power(n: int) -> int:
    return triton.next_power_of_2(max(1, n))
