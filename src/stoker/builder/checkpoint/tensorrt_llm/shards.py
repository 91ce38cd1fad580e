"""Reads a tensor of each rank of a pipeline stage, in the order of rows and with the meaning that ModelOpt's tensors have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.tensorrt_llm.gpu_order import decode_integers
from stoker.builder.checkpoint.tensorrt_llm.smoothquant import SmoothQuantScales
from stoker.builder.checkpoint.tensorrt_llm.tensors import SCALES_OF_INTEGERS
from stoker.builder.checkpoint.weights import TensorInfo

Stage = list[SafetensorsWeights]  # the files of one pipeline stage, by tensor-parallel rank


@dataclass(frozen=True, slots=True)
class Shards:
    """A tensor that each rank of a stage has."""

    stage: Stage
    name: str  # in the files of the ranks
    info: TensorInfo  # of each rank's tensor as `load` returns it
    load: Callable[[SafetensorsWeights], Tensor]


class ShardReader:
    """Finds how a tensor of the ranks is read. `integer_bits`: of weights in the order of a GPU, or 0."""

    def __init__(self, integer_bits: int, smoothquant: SmoothQuantScales | None) -> None:
        self._integer_bits, self._smoothquant = integer_bits, smoothquant

    def shards(self, stage: Stage, name: str, suffix: str, expert: int | None = None) -> Shards:
        """A tensor of the ranks, or its part of one expert. Raises CheckpointError for ranks with different shapes.

        Weights in the order of a GPU are decoded, and their scales transposed.
        """
        infos = [rank.tensors[name] for rank in stage]
        if any(info != infos[0] for info in infos):
            raise CheckpointError(f"{stage[-1].files[0]}: {name} does not fit the other ranks.", cure=DOWNLOAD_AGAIN)
        if self._smoothquant is not None and (found := self._smoothquant.find(stage[0], name, suffix)) is not None:
            return Shards(stage, name, *found)
        load = partial(_read, name=name, expert=expert)
        shape = infos[0].shape if expert is None else infos[0].shape[1:]
        stem, bits = name.removesuffix(suffix), self._integer_bits
        scale = next((stem + one for one in SCALES_OF_INTEGERS if stem + one in stage[0].tensors), None)
        if suffix == "prequant_scaling_factor" and len(shape) == 2 and shape[0] == 1:
            return Shards(stage, name, TensorInfo(shape[1:], infos[0].dtype), lambda rank: load(rank)[0])
        if not bits or scale is None or suffix not in (*SCALES_OF_INTEGERS, "zero", "weight"):
            return Shards(stage, name, TensorInfo(shape, infos[0].dtype), load)
        if suffix != "weight":
            shape = (shape[0], 1) if len(shape) == 1 else shape[::-1]
            return Shards(stage, name, TensorInfo(shape, infos[0].dtype), lambda rank: load(rank).t().reshape(shape))
        if len(shape) != 2:
            raise CheckpointError(f"{stage[0].location(name)} has shape {list(shape)}, and a matrix is expected.", cure=DOWNLOAD_AGAIN)
        scales = self.shards(stage, scale, scale.removeprefix(stem), expert)
        zeros = self.shards(stage, f"{stem}zero", "zero", expert) if f"{stem}zero" in stage[0].tensors else None

        def decode(rank: SafetensorsWeights) -> Tensor:
            """The signed values int8 [out, in]."""
            return decode_integers(rank.location(name), load(rank), bits, scales.load(rank), None if zeros is None else zeros.load(rank))

        return Shards(stage, name, TensorInfo((shape[1] * infos[0].dtype.itemsize * 8 // bits, shape[0]), torch.int8), decode)


def followed_by(first: Shards, second: Shards) -> Shards:
    """The rows of `first`, then those of `second`. Raises CheckpointError for tensors with other axes or dtypes."""
    if (
        not first.info.shape
        or len(first.info.shape) != len(second.info.shape)
        or first.info.shape[1:] != second.info.shape[1:]
        or first.info.dtype != second.info.dtype
    ):
        raise CheckpointError(f"{first.stage[0].files[0]}: {second.name} does not fit {first.name}.", cure=DOWNLOAD_AGAIN)
    shape = (first.info.shape[0] + second.info.shape[0], *first.info.shape[1:])
    return Shards(
        first.stage, first.name, TensorInfo(shape, first.info.dtype), lambda rank: torch.cat((first.load(rank), second.load(rank)))
    )


def _read(rank: SafetensorsWeights, name: str, expert: int | None) -> Tensor:
    """A tensor of a rank, or its part [expert], of which only the bytes are read."""
    if expert is None:
        return rank.read(name)
    info = rank.tensors[name]
    out = torch.empty(info.shape[1:], dtype=info.dtype)
    flat, done = out.view(-1), 0
    for chunk in rank.range_chunks(name, expert * out.numel(), (expert + 1) * out.numel()):
        flat[done : done + chunk.numel()].copy_(chunk)
        done += chunk.numel()
    return out
