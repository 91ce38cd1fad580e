"""The tile and the number of splits of an attention launch: what tuning for a device may change, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

LONG_SPLIT = 8192  # tokens: longer splits are cut again, so that the CTAs of one row do not outlast the rest of the batch
MAX_SPLITS = 64


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


def decode_tile(head_size: int, dtype: torch.dtype, heads: int, num_tiles: int, num_sms: int, paired: bool = False) -> AttentionTile:
    """The tile for one token's `heads` that share a KV head; `num_tiles`: query tiles of the launch, without splits.

    Decode is bound by memory. With few tiles, a key tile is a whole block, for the shortest chain of dependent loads, 3 stages deep. With
    many, on one H200 over 1,000 keys: 2 stages of 64 keys take 64.4 µs for 64 rows and 241 µs for 256 (3 stages: 73 and 242; 4 stages of
    32 keys: 67 and 246).
    `paired` (an 8-bit cache, two features at once): 64 rows over 1,000 keys take 39.4 µs with 3 stages of 64, 47.6 with 2; 512 rows over
    1,500 keys take 430 µs with these, and 407 with CTAs of one warp, which never waits for another.
    """
    block_m = min(32, max(16, triton.next_power_of_2(heads)))
    if head_size > 256:
        return AttentionTile(block_m, 16 if dtype == torch.float32 else 32, 8, 2)
    if dtype == torch.float32:
        return AttentionTile(block_m, 16 if head_size > 128 else 32, 4, 2)
    if head_size > 128:
        return AttentionTile(block_m, 32, 4, 3)
    if paired:
        return AttentionTile(block_m, 32, 1, 3) if num_tiles > 8 * num_sms and block_m == 16 else AttentionTile(block_m, 64, 4, 3)
    return AttentionTile(block_m, 64, 4, 3 if num_tiles < 2 * num_sms else 2)


def prefill_tile(head_size: int, dtype: torch.dtype, rows: int, num_tiles: int, num_sms: int, narrow: bool = False) -> AttentionTile:
    """The tile for prefill rows. `rows`: the longest row's tokens × heads of a group; `num_tiles`: tiles of 128 rows in the launch;
    `narrow`: an 8-bit cache."""
    if dtype == torch.float32:
        return AttentionTile(16, 16, 4, 2) if head_size > 128 else AttentionTile(32, 32, 4, 2)
    # Short prompts: 128 tokens of 32 / 8 heads take 6.4 µs in tiles of 16 rows, 14.6 in tiles of 64.
    if rows <= 16 or (4 * num_tiles <= num_sms and head_size <= 256):
        return decode_tile(head_size, dtype, 16, num_tiles, num_sms)
    if head_size > 256:
        return AttentionTile(64, 32, 8, 2)
    underfilled = rows <= 64 or num_tiles < num_sms
    if head_size > 192:
        return AttentionTile(64, 32, 4, 2) if underfilled else AttentionTile(128, 32, 8, 3)
    if narrow and not underfilled and head_size <= 128:  # 4 prompts of 2,048 tokens take 462 µs, 520 over 64 keys at a time
        return AttentionTile(128, 128, 8, 2)
    return AttentionTile(64, 64, 4, 2) if underfilled else AttentionTile(128, 64, 8, 2 if head_size > 128 else 3)


def choose_splits(num_tiles: int, max_key_tiles: int, max_seq_len: int, num_sms: int) -> Splits:
    """Splits that fill the device when query tiles are few, and that cut rows longer than LONG_SPLIT in any case.

    Filling means about one CTA per SM: with two, 8 rows over 1,000 keys took 20 µs instead of 14. `max_key_tiles`: key tiles of the longest
    row possible. Rows that are shorter than the bound use fewer splits: each CTA finds its share of its row on the device, so that one
    captured launch serves every length under the bound.
    """
    fill = min(1 << max(0, (num_sms // num_tiles).bit_length() - 1), _power_of_2(max_key_tiles), MAX_SPLITS)
    long = min(_power_of_2(triton.cdiv(max_seq_len, LONG_SPLIT)), MAX_SPLITS)
    if fill >= long:
        return Splits(fill, 1)
    return Splits(long, max(1, triton.cdiv(max_key_tiles * LONG_SPLIT, max_seq_len) // (4 * fill if fill > 1 else 1)))


def _power_of_2(n: int) -> int:
    return triton.next_power_of_2(max(1, n))
