"""Launch of the fused layer kernel for 3 to 64 tokens of bfloat16 against int4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.fused_layer.large_batch.config import NUM_WARPGROUPS, NUM_WARPS, TILE_ROWS, shared_offsets, stage_bytes
from stoker.kernels.triton.fused_layer.large_batch.kernel import fused_layer_large_batch_kernel
from stoker.kernels.triton.fused_layer.linear_args import linear_args, pack_linears, pack_numbers
from stoker.kernels.triton.fused_layer.requirements import SHARED_BYTES, first_weight, linear_flags, scale_dtype
from stoker.kernels.triton.fused_layer.small_batch.launch import barrier_counter
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.ptx.pipeline import BLOCK_ROW_BYTES
from stoker.kernels.triton.ptx.wgmma import operand_bytes
from stoker.kernels.tuning.table import LargeBatchCosts
from stoker.kernels.types import FusedLayer

MIN_TOKENS, MAX_TOKENS = 3, 64  # with fewer tokens the small-batch kernel is faster (benchmarks/results/h200_fused_layer_large_batch.json)
MAX_SPLIT_K = 32
MIN_STAGES, MAX_STAGES = 2, 4
SCRATCH_BYTES = 1 << 10  # shared memory that Triton may need itself
REGISTERS = 128  # per thread: what 16 warps can have


@dataclass(frozen=True, slots=True)
class Plan:
    """How a launch cuts the linears into slices, and how many stages it prefetches."""

    num_tokens: int  # a power of two
    split_k: tuple[int, ...]  # per linear, the number of slices of its input features
    max_slice_blocks: int  # of a slice of any linear
    num_stages: int


def supports_large_batch(layer: FusedLayer, rows: int) -> bool:
    """Whether the kernel computes `rows` rows of a layer that `meets_requirements`.

    It needs int4 weights of whole 64-row tiles, bfloat16 norms, and outputs that are whole blocks of the next linear, since a linear writes
    the next one's operand. It does not sum over tensor-parallel ranks.
    """
    weight, norms = first_weight(layer), [linear.fusion.norm_weight for linear in (layer.up, layer.qkv) if linear is not None]
    if (
        weight.format != "int4"
        or layer.group.size > 1
        or not MIN_TOKENS <= rows <= MAX_TOKENS
        or any(norm is None or norm.dtype != torch.bfloat16 for norm in norms)
    ):
        return False
    outputs = [linear.outputs for linear in layer.linears]
    inputs = [linear.weight.in_features for linear in layer.linears[1:] if linear.weight is not None]
    in_tiles = all(linear.weight.out_features % TILE_ROWS.value == 0 for linear in layer.linears if linear.weight is not None)
    return outputs[: len(inputs)] == inputs and in_tiles and plan_for(layer, rows, num_sms(weight.values.device)) is not None


def run_large_batch(x: Tensor, residual: Tensor, layer: FusedLayer, plan: Plan | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute a fused layer (`ops.fused_layer`) for MIN_TOKENS to MAX_TOKENS rows of bfloat16, by one cooperative launch.

    `plan` overrides `plan_for`.
    """
    (m, hidden), num_ctas = residual.shape, num_sms(x.device)
    plan = plan or plan_for(layer, m, num_ctas)
    assert plan is not None
    size, weight = layer.up.outputs, first_weight(layer)
    middle, after = torch.empty_like(residual), torch.empty_like(residual)
    operands = [x.new_empty(features * plan.num_tokens) for features in (hidden, size, hidden)]
    linears = [
        linear_args(layer.out, x, x.shape[1], residual, middle),
        linear_args(layer.up, operands[0], hidden, None, None),
        linear_args(layer.down, operands[1], size, middle, after),
    ]
    qkv = None
    if layer.qkv is not None:
        qkv = x.new_empty(m, layer.qkv.outputs)
        linears.append(linear_args(layer.qkv, operands[2], hidden, None, qkv))
    sizes, costs = _sizes(layer), device_tuning(x.device).costs.fused_layer_large_batch
    assert costs is not None
    count = max(_partials_count(sizes, plan), _max_partials_count(sizes, weight.group_size, num_ctas, costs))
    fused_layer_large_batch_kernel[(num_ctas,)](
        pack_linears(linears),
        _partials(x.device, count),
        torch.empty(hidden // 16 * plan.num_tokens, dtype=torch.float32, device=x.device),
        barrier_counter(x.device),
        num_ctas,
        m,
        **linear_flags(layer),
        SPLIT_K=pack_numbers(plan.split_k),
        ACTIVATION=layer.up.fusion.gate,
        GROUP_SIZE=weight.group_size,
        SCALE_DTYPE=scale_dtype(weight),
        ZERO_KIND=weight.zero_kind,
        NUM_STAGES=plan.num_stages,
        MAX_SLICE_BLOCKS=plan.max_slice_blocks,
        NUM_TOKENS=plan.num_tokens,
        num_warps=NUM_WARPS.value,
        maxnreg=REGISTERS,
        launch_cooperative_grid=True,
        **pdl_launch_options(x),
    )
    return after, qkv


def plan_for(layer: FusedLayer, rows: int, num_ctas: int) -> Plan | None:
    """The plan for `rows` rows. None where shared memory has no room for MIN_STAGES stages, or the device's costs were not measured."""
    weight = first_weight(layer)
    costs = device_tuning(weight.values.device).costs.fused_layer_large_batch
    return None if costs is None else _plan(_sizes(layer), weight.group_size, max(8, next_power_of_2(rows)), num_ctas, costs)


def plan_with_split_k(layer: FusedLayer, num_tokens: int, split_k: tuple[int, ...]) -> Plan | None:
    """The plan with a given number of slices of each linear, or None if it does not fit. Used by benchmarks."""
    return _plan_with_split_k(_sizes(layer), first_weight(layer).group_size, num_tokens, split_k)


@cache
def _plan(sizes: tuple[tuple[int, int], ...], group_size: int, num_tokens: int, num_ctas: int, costs: LargeBatchCosts) -> Plan | None:
    """The plan with the least estimated time. Cached, because all layers are alike, and eager steps need it for every one of them."""
    max_blocks = max((count for count in range(1, 257) if _num_stages(num_tokens, count, group_size) >= MIN_STAGES), default=0)
    split_k = tuple(
        _best_split_k(tiles, blocks, num_tokens, num_ctas, max_blocks, nth == 0, costs) for nth, (tiles, blocks) in enumerate(sizes)
    )
    return _plan_with_split_k(sizes, group_size, num_tokens, split_k) if all(split_k) else None


def _plan_with_split_k(sizes: tuple[tuple[int, int], ...], group_size: int, num_tokens: int, split_k: tuple[int, ...]) -> Plan | None:
    """The plan with given numbers of slices, or None if shared memory has no room for MIN_STAGES stages."""
    slice_blocks = max(cdiv(blocks, count) for (_, blocks), count in zip(sizes, split_k, strict=True))
    num_stages = min(_num_stages(num_tokens, slice_blocks, group_size), MAX_STAGES)
    return Plan(num_tokens, split_k, slice_blocks, num_stages) if num_stages >= MIN_STAGES else None


def _num_stages(num_tokens: int, slice_blocks: int, group_size: int) -> int:
    """The number of stages that fit into shared memory beside the operand of `slice_blocks` blocks."""
    other_bytes = shared_offsets(0, num_tokens, slice_blocks, group_size)[-1] + SCRATCH_BYTES
    return int(SHARED_BYTES - other_bytes) // (NUM_WARPS.value * stage_bytes(group_size))


def _best_split_k(tiles: int, blocks: int, num_tokens: int, num_ctas: int, max_blocks: int, is_first: bool, costs: LargeBatchCosts) -> int:
    """The number of slices with the least estimated time, where a slice has at most `max_blocks` blocks; 0 if there is none."""

    def estimate_us(count: int) -> float:
        """The estimated time in µs of the linear with `count` slices."""
        slice_blocks, cta_tiles = cdiv(blocks, count), cdiv(tiles, num_ctas // count)
        steps = max(cdiv(cta_tiles * slice_blocks, NUM_WARPGROUPS.value), slice_blocks)
        operand = (costs.first_operand_factor if is_first else 1) * slice_blocks * operand_bytes(num_tokens)
        partial_sums = costs.partial_sums_factor * cta_tiles * 256 * num_tokens
        return costs.block_us * steps + (operand + partial_sums) / costs.bytes_per_us

    counts = range(1, min(blocks, MAX_SPLIT_K, num_ctas) + 1)
    without_empty_slices = [count for count in counts if cdiv(blocks, cdiv(blocks, count)) == count]
    fitting = (count for count in without_empty_slices if cdiv(blocks, count) <= max_blocks)
    return min(fitting, key=estimate_us, default=0)


def _sizes(layer: FusedLayer) -> tuple[tuple[int, int], ...]:
    """(number of 64-row tiles, number of blocks per row) of each weight."""
    weights = (linear.weight for linear in layer.linears if linear.weight is not None)
    return tuple((weight.out_features // TILE_ROWS.value, weight.row_bytes // BLOCK_ROW_BYTES.value) for weight in weights)


def _partials_count(sizes: tuple[tuple[int, int], ...], plan: Plan) -> int:
    """The number of float32 elements of `partials_ptr`: two segments per slice and tile, for the linear that needs the most."""
    return max(tiles * count for (tiles, _), count in zip(sizes, plan.split_k, strict=True)) * 2 * TILE_ROWS.value * plan.num_tokens


@cache
def _max_partials_count(sizes: tuple[tuple[int, int], ...], group_size: int, num_ctas: int, costs: LargeBatchCosts) -> int:
    """The largest `_partials_count` for any number of tokens. One buffer serves all launches, 59 MB with Llama-3.1-8B's shapes."""
    plans = (_plan(sizes, group_size, num_tokens, num_ctas, costs) for num_tokens in (8, 16, 32, MAX_TOKENS))
    return max(_partials_count(sizes, plan) for plan in plans if plan is not None)


@cache
def _partials(device: torch.device, count: int) -> Tensor:
    """The buffer of partial sums. It is zero before and after each launch; launches on a device run one after another."""
    return torch.zeros(count, dtype=torch.float32, device=device)
