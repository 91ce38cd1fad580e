"""Launch of the fused layer kernel for 1 to 8 tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.inbox import UNIT_BYTES, Inbox
from stoker.kernels.triton.all_reduce import UNLIMITED_POLLS
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.fused_layer.linear_args import linear_args, pack_linears, pack_numbers
from stoker.kernels.triton.fused_layer.requirements import SHARED_BYTES, first_weight, kernel_format, linear_flags, scale_dtype
from stoker.kernels.triton.fused_layer.small_batch.config import (
    SmallBatchConfig,
    block_features,
    columns_per_token,
    needed_bytes,
    stage_bytes,
)
from stoker.kernels.triton.fused_layer.small_batch.kernel import fused_layer_small_batch_kernel
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.ptx.pipeline import BLOCK_ROW_BYTES
from stoker.kernels.tuning.tiles import SmallBatchTile
from stoker.kernels.types import FusedLayer

MAX_TOKENS = 8  # the columns of the matrix instruction; activations of two digits take two columns per token
SCRATCH_BYTES = 2 << 10  # shared memory for Triton's reductions, and for rounding the allocation up to 1 KiB
MIN_STAGES = 2


def supports_small_batch(layer: FusedLayer, rows: int) -> bool:
    """Whether the kernel computes `rows` rows of a layer that `meets_requirements`: it has a measured tile and the activations fit.

    On tensor-parallel ranks, it also needs inboxes, in which a CTA's partial sums fit into one unit.
    """
    tile = measured_tile(first_weight(layer))
    if tile is None or rows > tile.max_tokens:
        return False
    config, inbox = _config(layer, rows, _num_ctas(layer), tile), _inbox(layer)
    if config is None or layer.group.size == 1:
        return config is not None
    return inbox is not None and 4 * rows * config.max_rows[0] <= UNIT_BYTES and _num_ctas(layer) <= inbox.num_units


def run_small_batch(
    x: Tensor, residual: Tensor, layer: FusedLayer, tile: SmallBatchTile | None = None, max_polls: int = UNLIMITED_POLLS
) -> tuple[Tensor, Tensor | None]:
    """Compute a fused layer (`ops.fused_layer`) for up to MAX_TOKENS rows. `tile` overrides `measured_tile`.

    On tensor-parallel ranks, a CTA gives up waiting for its peers after `max_polls` loads; its results are undefined then.

    The launch is cooperative, because the grid barrier needs all CTAs to be resident: where processes share a device, half of a grid must
    not wait for the other half. Without it a step is up to 2 % faster, since CTAs start one by one while attention still runs.
    """
    assert x.shape[0] <= MAX_TOKENS and x.is_contiguous() and residual.is_contiguous()
    weight = first_weight(layer)
    tile, num_ctas = tile or measured_tile(weight), _num_ctas(layer)
    assert tile is not None
    config = _config(layer, x.shape[0], num_ctas, tile)
    assert config is not None
    middle, inner, after = torch.empty_like(residual), x.new_empty(len(x), layer.up.outputs), torch.empty_like(residual)
    linears = [
        linear_args(layer.out, x, x.shape[1], residual, middle),
        linear_args(layer.up, middle, middle.shape[1], None, inner),
        linear_args(layer.down, inner, inner.shape[1], middle, after),
    ]
    qkv = None
    if layer.qkv is not None:
        qkv = x.new_empty(len(x), layer.qkv.outputs)
        linears.append(linear_args(layer.qkv, after, after.shape[1], None, qkv))
    fused_layer_small_batch_kernel[(num_ctas,)](
        pack_linears(linears),
        barrier_counter(x.device),
        num_ctas,
        **_rank_arguments(_inbox(layer), max_polls),
        **linear_flags(layer),
        FEATURES=pack_numbers(config.features),
        ACTIVATION=config.activation,
        FORMAT=config.format,
        GROUP_SIZE=config.group_size,
        SCALE_DTYPE=config.scale_dtype,
        ZERO_KIND=config.zero_kind,
        NUM_STAGES=config.num_stages,
        NUM_WARPS=config.num_warps,
        BLOCKS_PER_STAGE=config.blocks_per_stage,
        MAX_ROWS=pack_numbers(config.max_rows),
        NUM_TOKENS=config.num_tokens,
        num_warps=config.num_warps,
        maxnreg=tile.registers,
        launch_cooperative_grid=True,
        **pdl_launch_options(x),
    )
    return after, qkv


def measured_tile(weight: PackedWeight) -> SmallBatchTile | None:
    """The tile of the weight's format from the device's tuning table. None means that the kernel is not used."""
    dtype = str(weight.values.dtype).removeprefix("torch.") if weight.format == "dense" else weight.format
    tile: SmallBatchTile | None = device_tuning(weight.values.device).tile("fused_layer_small_batch", dtype)
    return tile


def _inbox(layer: FusedLayer) -> Inbox | None:
    """The inbox for the all-reduces of a layer; None on a single rank, and where ranks have none."""
    return None if layer.group.inboxes is None else layer.group.inboxes.fused_layers


def _rank_arguments(inbox: Inbox | None, max_polls: int) -> dict[str, Any]:
    """The kernel arguments of the all-reduces; all are None on a single rank."""
    if inbox is None:
        return dict.fromkeys(("inboxes", "own_inbox", "turns_ptr", "rank", "max_polls", "UNITS"))
    return {
        "inboxes": inbox.addresses,
        "own_inbox": inbox.addresses[inbox.rank],
        "turns_ptr": inbox.turns,
        "rank": inbox.rank,
        "max_polls": max_polls,
        "UNITS": inbox.num_units,
    }


def _num_ctas(layer: FusedLayer) -> int:
    """The number of CTAs of a launch: one per SM, the same on all ranks, because CTAs exchange partial sums by number."""
    inboxes = layer.group.inboxes
    return inboxes.num_ctas if inboxes is not None and inboxes.num_ctas else num_sms(first_weight(layer).values.device)


@cache
def barrier_counter(device: torch.device) -> Tensor:
    """The counter of the grid barrier: int32 [1], shared by all launches on a device, which run one after another."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _config(layer: FusedLayer, tokens: int, num_ctas: int, tile: SmallBatchTile) -> SmallBatchConfig | None:
    """The constants of a launch. None for more tokens than columns, more rows of a CTA than threads, or no shared memory for two stages."""
    weights = [linear.weight for linear in layer.linears if linear.weight is not None]
    sizes = tuple((one.outputs, weight.out_features, weight.row_bytes) for one, weight in zip(layer.linears, weights, strict=True))
    biases = tuple(int(weight.bias is not None) for weight in weights)
    gate = layer.up.fusion.gate
    assert gate is not None
    first = weights[0]
    weight_format = kernel_format(first)
    assert weight_format is not None
    return _plan(sizes, biases, gate, (weight_format, first.group_size, scale_dtype(first), first.zero_kind), tokens, num_ctas, tile)


@cache
def _plan(
    sizes: tuple[tuple[int, int, int], ...],
    biases: tuple[int, ...],
    gate: str,
    weight_format: tuple[str, int, str, str],
    tokens: int,
    num_ctas: int,
    tile: SmallBatchTile,
) -> SmallBatchConfig | None:
    """Compute `_config`. Cached, because all layers are alike, and eager steps need it for each of them.

    `sizes` has (outputs, rows, bytes of a row) of each linear; `weight_format` is (FORMAT, group size, scale dtype, zero kind).
    """
    form, group_size, scales, zero_kind = weight_format
    config = SmallBatchConfig(
        gated=tuple(rows // outputs - 1 for outputs, rows, _ in sizes),
        has_bias=biases,
        features=(),
        activation=gate,
        format=form,
        group_size=group_size,
        scale_dtype=scales,
        zero_kind=zero_kind,
        num_stages=0,
        num_warps=tile.num_warps,
        blocks_per_stage=tile.blocks_per_stage,
        max_rows=(),
        num_tokens=tokens,
    )
    if tokens * columns_per_token(config) > MAX_TOKENS:
        return None
    features, max_rows, step_blocks = [], [], tile.num_warps * tile.blocks_per_stage
    for outputs, rows, row_bytes in sizes:
        of_cta = 16 * cdiv(outputs // 16, num_ctas)
        if of_cta > 32 * tile.num_warps:
            return None
        max_rows.append(of_cta * (rows // outputs))
        steps = cdiv(row_bytes // BLOCK_ROW_BYTES.value, step_blocks)
        features.append(steps * step_blocks * block_features(config))
    config = replace(config, features=tuple(features), max_rows=tuple(max_rows))
    other_bytes = needed_bytes(config) + SCRATCH_BYTES
    num_stages = min(tile.pipeline_bytes, SHARED_BYTES - other_bytes) // (tile.num_warps * stage_bytes(config))
    return replace(config, num_stages=num_stages) if num_stages >= MIN_STAGES else None
