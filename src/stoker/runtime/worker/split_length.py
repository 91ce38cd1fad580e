"""The length of the splits of decode attention, chosen for the lengths of the rows of each step.

A launch of decode attention has one CTA per row and KV head, or several CTAs for rows that are split. Its time is about

    the time of the longest CTA + the time of all keys on all SMs + the time of combining splits

Splits shorten the first part and add the third. They are worth it for a row that is much longer than the others, and when there are too few
rows to occupy all SMs; rows of about equal lengths in a larger batch are not split. The length is in the inputs of the step: a captured
graph has CTAs for the shortest splits, and those that no row uses exit at once.

Lengths are in tokens. On one H200 with an FP8 cache and 8 KV heads of 128, a CTA reads 64 tokens in 0.9 to 1.3 µs.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker.core.model_config import ModelConfig
from stoker.kernels.types import LONG_SPLIT, SHORT_SPLIT
from stoker.layers.decoder import local_kv_shapes

KEY_TILE = 64  # the keys that a CTA reads at a time: splits are whole tiles
# The start of a CTA, and the combination of its result with those of the other splits, take the time in which it reads this many tokens.
# Fitted to launches of 33 to 128 rows ("Long rows beside short ones" in docs/log.md): 10 ns per split on the whole device, or 5 µs in each
# of its four CTAs per SM.
SPLIT_COST = 400
_CTAS_PER_SM = 4  # of heads of up to 128 features: they have four warps, 96 to 128 registers per thread, and 38 to 54 KiB of shared memory
_MAX_HEADS = 32  # query heads of one KV head that a CTA computes


def split_length(lens: np.ndarray, resident_rows: float) -> int:
    """The tokens of a split for decode rows of `lens` tokens, int32 [R]: from SHORT_SPLIT to LONG_SPLIT, which means not to cut them.

    `resident_rows` is a result of `num_resident_rows`; 0: not known.
    """
    if resident_rows <= 0 or len(lens) == 0:
        return LONG_SPLIT
    longest, total = int(lens.max()), int(lens.sum())
    # With fewer rows than are resident, splits of the first length occupy all SMs. With more, rows of ordinary length are not cut.
    shortest = max(SHORT_SPLIT, min(total / resident_rows, total / len(lens)))
    length = int(-(-shortest // KEY_TILE)) * KEY_TILE
    if length >= min(longest, LONG_SPLIT):
        return LONG_SPLIT
    cut = lens[lens > length]
    num_splits = int((-(-cut // length)).sum())
    is_faster = length + SPLIT_COST * (1 + num_splits / resident_rows) < longest
    return length if is_faster else LONG_SPLIT


def num_resident_rows(model: ModelConfig, tensor_parallel: int, device: torch.device) -> float:
    """The decode rows whose CTAs, without splits, are resident on the device at the same time. 0: no CUDA device, or no attention.

    The heads of the first layer with attention count.
    """
    if device.type != "cuda":
        return 0.0
    layer, attention = next(((i, found.attention) for i, found in enumerate(model.layers) if found.attention is not None), (0, None))
    if attention is None:
        return 0.0
    kv_heads, key_size, _ = local_kv_shapes(model, layer, tensor_parallel)
    group = max(1, attention.num_heads // tensor_parallel // kv_heads)
    ctas_of_row = kv_heads * -(-group // _MAX_HEADS)
    ctas_per_sm = min(_CTAS_PER_SM, max(1, 128 * _CTAS_PER_SM // key_size))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms * ctas_per_sm / ctas_of_row
