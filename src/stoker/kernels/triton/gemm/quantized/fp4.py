"""Stacked experts in FP4: the layout `quads` of `PackedWeight`, whose values become bfloat16 in 13 instructions per eight values.

An expert [n, k] is stored in chunks of 64 features. The rows r and r + n / 2, a gate and the up that it gates if there are gates, are the
pair r. They have 128 values of a chunk, four in each of 32 words of 16 bits:

    values    [k / 64 chunks, n / 2 pairs of rows, 4 t, 2 steps, 2 halves, 2 j]     stored as int16 [n, k / 4]

    slot of a word          0                     1                     2                     3
    row                     r                     r + n / 2             r                     r + n / 2
    feature of the chunk    f                     f                     f + 32                f + 32        f = 16 step + 8 half + 2 t + j

A thread of a matrix instruction has, of a row, the features 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16, where t is its number modulo
four. Its words of a chunk are neighbours: one load of 16 bytes. In a bfloat16 whose exponent is too small by 126, an e2m1 value has its
sign in bit 15, its exponent in bits 8 and 7, and its fraction in bit 6. Those of slot 3 are there but for the fraction; a shift or a
rotation by eight bits, of both words of a register at once, brings those of the others there:

    bit of a word    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    slot              3   3   1   2   2   2   0   3   3   1   1   1   2   0   0   0
    field             s   f   s   e   e   f   s   e   e   e   e   f   s   e   e   f

    slot 0: word << 6          slot 1: word << 2          slot 2: rotated << 4          slot 3: word, f from rotated

No four places of the pattern s e e f, moved by shifts and rotations alone, fill a word; this order needs the fewest instructions.

    scale     int64 [k / 64 chunks × steps, n / 2]: four bfloat16, of slot 0 in the lowest bits. Groups of 16 have a word for each of two
              steps of 16 features, others one, with the scales of groups of 32

Scales are stored times 2 ** 126, which corrects the exponent of the values, so that each value takes one product. That is exact for
scales of at most LARGEST_SCALE. Those of NVFP4 (e4m3, at most 448) become smaller by 2 ** 8, and `row_scale` larger.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.quant_int4 import unpack

CHUNK = 64  # input features whose values are stored together
LARGEST_SCALE = 2.0  # × 2 ** 126 × the largest value's bits, 6 × 2 ** -126; twice this scale overflows
_CONVERTED = 1 << 25  # values that are converted together: about 0.8 GB of temporary tensors
_SCALE_EXPONENT = 126
_ROW_EXPONENT = 8  # 448 × 2 ** -8 <= LARGEST_SCALE


def in_quads(weight: PackedWeight) -> PackedWeight | None:
    """The experts `weight`, FP4 in the layout `stored`, in the layout `quads`.

    None: a scale is larger than LARGEST_SCALE or not a number, or the number of rows is odd. Of a meta tensor, scales are taken to be
    small. The result does not refer to the given tensors.
    """
    scale, row_scale = weight.scale, weight.row_scale
    assert scale is not None
    if weight.out_features % 2:
        return None
    factor = 1.0
    if row_scale is not None:
        row_scale, factor = row_scale * 2.0**_ROW_EXPONENT, 2.0**-_ROW_EXPONENT
    if not scale.is_meta and not bool((scale.float().abs() * factor <= LARGEST_SCALE).all()):
        return None
    group = 32 if weight.group_size % 32 == 0 else 16
    chunks = -(-weight.in_features // CHUNK)
    scales = (scale.float() * (factor * 2.0**_SCALE_EXPONENT)).bfloat16().repeat_interleave(weight.group_size // group, dim=-1)
    words, scale_words = _quad_words(weight.values, chunks), _scale_words(scales, chunks, group)
    return replace(weight, values=words, scale=scale_words, row_scale=row_scale, group_size=group, layout="quads")


def _quad_words(values: Tensor, chunks: int) -> Tensor:
    """int16 [E, n, 16 × chunks] from uint8 [E, n, k / 2] of the layout `stored`.

    As many experts are converted together as have _CONVERTED values, because temporary tensors are larger than the weight.
    """
    experts, n, _ = values.shape
    words = torch.empty((experts, n, chunks * CHUNK // 4), dtype=torch.int16, device=values.device)
    if values.is_meta:  # no content: hundreds of experts of each layer would take most of the time of an ahead-of-time trace
        return words
    step = max(1, _CONVERTED // (n * chunks * CHUNK))
    for part, target in zip(values.split(step), words.split(step), strict=True):
        codes = unpack(part).int()
        codes = F.pad(codes, (0, chunks * CHUNK - codes.shape[-1]))
        fields = ((codes & 8) << 12) | ((codes & 7) << 6)  # bits 15, 8, 7 and 6
        # Axes: experts, row of a pair, pairs, chunk, half of the chunk, step, half of a step, t, j
        split = fields.view(-1, 2, n // 2, chunks, 2, 2, 2, 4, 2).permute(1, 4, 0, 3, 2, 7, 5, 6, 8).reshape(2, 2, -1)
        target.view(-1).copy_(_word(split[0, 0], split[1, 0], split[0, 1], split[1, 1]))
    return words


def _word(*slots: Tensor) -> Tensor:
    """int16: the words with these four values, int32 with the fields in the bits of a bfloat16."""
    zero, one, two, three = slots
    rotated = two >> 4
    word = (zero >> 6) | (one >> 2) | (rotated >> 8) | ((rotated & 0xFF) << 8) | (three & 0x8180) | ((three & 0x40) << 8)
    return torch.where(word > 0x7FFF, word - 0x10000, word).short()


def _scale_words(scales: Tensor, chunks: int, group: int) -> Tensor:
    """int64 [E, chunks × steps, n / 2] from bfloat16 [E, n, groups]."""
    experts, n, _ = scales.shape
    steps = 32 // group
    scales = F.pad(scales, (0, chunks * CHUNK // group - scales.shape[2]))
    # Axes: experts, row of a pair, pairs, chunk, half of the chunk, step -> the row is in the lowest bits of a slot's number
    split = scales.view(experts, 2, n // 2, chunks, 2, steps).permute(0, 3, 5, 2, 4, 1)
    return split.reshape(experts, chunks * steps, n // 2 * 4).view(torch.int64)
