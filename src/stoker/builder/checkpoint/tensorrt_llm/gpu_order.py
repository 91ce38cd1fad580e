"""Integers in the order of a GPU's matrix instructions, which the converters of TensorRT-LLM store for weight-only int8 and int4 and GPTQ.

A weight [out, in] becomes, in this order (preprocess_weights_for_mixed_gemm of TensorRT-LLM):

    permuted      input features are exchanged within 16 (int8) or 32 (int4), so that a thread loads the values that it multiplies
    transposed    the values of an output feature are neighbours
    interleaved   runs of 64 input features of 2 (int8) or 4 (int4) output features alternate
    biased        values are stored plus 128 or 8, and exchanged within 32 bits

The steps depend on the GPU of the conversion, which the checkpoint does not name. Three combinations exist:

    GPU                                                        permuted, biased   interleaved
    compute capability 7.5 to 8.9 and 12; experts on any GPU   yes                yes
    9.0, later versions                                        yes                no
    9.0, earlier versions; 10.0                                no                 no

The values show which one was used. Weights are around 0, so the smaller mean magnitude tells biased values from signed ones. Each scale
was chosen for the extremes of its group, so each group has a value at an end of the range, and groups that are mixed from several output
features often have none. If both orders have as many such groups (those of 64 are never mixed), the real values decide: runs of one output
feature have similar magnitudes, and with the scales of other groups they vary more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.kernels.reference.quant_int4 import unpack

_TILE = 64  # neighbouring input features of an output feature where output features are interleaved
_CLEAR_RATIO = 1.2  # by which the variances of two orders must differ at least. Those of Gaussian weights differ 1.6 to 5 times.


class _Width(NamedTuple):
    """What depends on the number of bits."""

    feature_order: tuple[int, ...]  # the input feature at each position of a permuted run
    register_order: tuple[int, ...]  # the value at each position of 32 bits
    interleaved: int  # output features


_WIDTHS = {
    8: _Width((0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15), (0, 2, 1, 3), 2),
    4: _Width(
        (0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31),
        (0, 2, 4, 6, 1, 3, 5, 7),
        4,
    ),
}


def decode_integers(name: str, stored: Tensor, bits: int, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The signed values int8 [out, in] of a stored weight [in, out × bits / 8] bytes. Real values are value × scale + zero, both
    [out, groups].

    `name` is for messages. Raises CheckpointError for a shape that no GPU reads, and for values that do not show their order.
    """
    width, per_byte = _WIDTHS[bits], 8 // bits
    data = stored.contiguous().view(torch.uint8)
    rows, columns = data.shape[0], data.shape[1] * per_byte
    if rows % len(width.feature_order) or columns % 8 or rows % scale.shape[1] or scale.shape[0] != columns:
        raise CheckpointError(
            f"{name} [{rows}, {columns}] with scales {list(scale.shape)} is no weight that TensorRT-LLM orders for a GPU.",
            cure=DOWNLOAD_AGAIN,
        )
    half = 1 << (bits - 1)
    values = (unpack(data) if bits == 4 else data).flatten()
    biased, signed = _signed(values ^ half, bits), _signed(values, bits)
    if _magnitude(signed) <= _magnitude(biased):
        return signed.view(columns, rows)
    ordered = _undo(biased, width.register_order).view(columns, rows)
    plain = _undo(ordered, width.feature_order)
    if rows % _TILE or columns % width.interleaved:
        return plain
    tiles = ordered.view(columns // width.interleaved, rows // _TILE, width.interleaved, _TILE)
    separated = _undo(tiles.transpose(1, 2).reshape(columns, rows), width.feature_order)
    return _choose(name, (separated, plain), half, scale, zero)


def _signed(values: Tensor, bits: int) -> Tensor:
    """int8 from uint8, whose lowest bits are a number in two's complement."""
    return values.view(torch.int8) if bits == 8 else (values ^ 8).to(torch.int8) - 8


def _magnitude(values: Tensor) -> float:
    """The mean magnitude."""
    return float(values.abs().view(torch.uint8).float().mean())  # |-128| is 128 as an unsigned number


def _undo(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values of the last axis before they were moved: position i of each run received that of position `order[i]`."""
    runs: Tensor = values.unflatten(-1, (-1, len(order)))[..., torch.tensor(order).argsort()]
    return runs.flatten(-2)


def _choose(name: str, candidates: tuple[Tensor, Tensor], half: int, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The one of two candidates [out, in] whose groups are those of one output feature each."""
    if torch.equal(*candidates):
        return candidates[0]
    complete = [_complete_groups(values, half, scale.shape[1]) for values in candidates]
    if complete[0] != complete[1]:
        return candidates[complete.index(max(complete))]
    variances = [_variance(values, scale.float(), zero) for values in candidates]
    if max(variances) < _CLEAR_RATIO * min(variances) or max(variances) == 0:
        raise CheckpointError(
            f"{name} does not show for which GPU its values are ordered.",
            cure="Build from the Hugging Face checkpoint with --quantize WEIGHTS_ONLY_INT8 or WEIGHTS_ONLY_INT4.",
        )
    return candidates[variances.index(min(variances))]


def _complete_groups(values: Tensor, half: int, num_groups: int) -> int:
    """The number of groups that have a value at an end of the range."""
    grouped = values.unflatten(-1, (num_groups, -1))
    return int(((grouped == -half) | (grouped == half - 1)).any(-1).sum())


def _variance(values: Tensor, scale: Tensor, zero: Tensor | None) -> float:
    """The variance of the logarithmic magnitude of runs of 64 input features, without that of output features and of positions."""
    real = values.unflatten(-1, (scale.shape[1], -1)).float() * scale.unsqueeze(-1)
    if zero is not None:
        real += zero.float().unsqueeze(-1)
    magnitude = real.flatten(1).unflatten(-1, (-1, _TILE)).square().mean(-1).clamp(min=1e-30).log()
    return float((magnitude - magnitude.mean(1, keepdim=True) - magnitude.mean(0) + magnitude.mean()).var())
