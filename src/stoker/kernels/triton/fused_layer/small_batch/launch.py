"""The launch of `fused_layer_small_batch_kernel`: the fused layer for a few tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from stoker.kernels.quantized import FusedLayer, FusedLinear, RowWeight
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.fused_layer.small_batch.kernel import block_features, fused_layer_small_batch_kernel, shared_places
from stoker.kernels.triton.fused_layer.small_batch.schedule import slot_bytes
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES

BLOCK = BLOCK_BYTES.value // 16  # bytes of a row
MOST = 4  # tokens: a matrix instruction's eight columns
SHARED_BYTES = 227 << 10  # of one program
REDUCTIONS = 2 << 10  # of them, Triton's own, and what is lost to whole kilobytes


@dataclass(frozen=True, slots=True)
class SmallBatchTile:
    """How a program's warps share a tile of 16 rows, and how far ahead they ask."""

    num_warps: int
    blocks: int  # of 128 bytes of each row that a warp takes at a time
    ring: int  # bytes of all warps' rings
    registers: int  # of a thread: what is left is for the kernel before, which runs while rings fill
    most: int  # tokens: with more, making their codes takes longer than it saves


# Measured on one H200 in steps of Llama-3.1-8B's shapes (benchmarks/results/h200_tails.json); int4 in groups of 128.
TILES = {
    "bfloat16": SmallBatchTile(8, 1, 96 << 10, 168, 4),
    "float16": SmallBatchTile(8, 1, 96 << 10, 168, 4),
    "fp8": SmallBatchTile(8, 1, 96 << 10, 168, 4),
    "bytes": SmallBatchTile(8, 1, 112 << 10, 168, 2),
    "int4": SmallBatchTile(8, 1, 64 << 10, 168, 3),
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the kernel is compiled for."""

    depth: int
    rows: int  # the most of a program
    widths: tuple[int, ...]


def supports_small_batch(layer: FusedLayer, rows: int) -> bool:
    """Whether `run_small_batch` is for these weights, which `is_uniform`: a program has room for the rows' codes."""
    first = layer.out.weight
    assert first is not None
    tile = TILES[first.form]
    return rows <= tile.most and _plan(layer, rows, num_sms(first.weight.device), tile) is not None


def is_uniform(layer: FusedLayer) -> bool:
    """Whether these are four weights of one form on one device, in whole blocks and tiles, and each linear does what its place asks for."""
    weights = [linear.weight for linear in layer.linears]
    first = weights[0]
    if first is None or not supports(first.weight, "fused_layer") or first.form not in TILES:
        return False
    return all(w is not None and _kind(w) == _kind(first) and _is_whole(w) for w in weights) and _fits(layer)


def run_small_batch(x: Tensor, residual: Tensor, layer: FusedLayer, tile: SmallBatchTile | None = None) -> tuple[Tensor, Tensor | None]:
    """`ops.fused_layer` of MOST rows and fewer.

    All programs must be on the device at once, so the launch is a cooperative one: where processes share a device, half of a grid must not
    wait there for the other half. Without it a step is up to 2 % faster, since programs come in one by one while attention still runs.
    """
    assert x.shape[0] <= MOST and x.is_contiguous() and residual.is_contiguous()
    first = layer.out.weight
    assert first is not None
    tile, programs = tile or TILES[first.form], num_sms(x.device)
    plan = _plan(layer, x.shape[0], programs, tile)
    assert plan is not None
    middle, inner, after = torch.empty_like(residual), x.new_empty(len(x), layer.up.outputs), torch.empty_like(residual)
    links = [
        link(layer.out, x, x.shape[1], residual, middle),
        link(layer.up, middle, middle.shape[1], None, inner),
        link(layer.down, inner, inner.shape[1], middle, after),
    ]
    qkv = None
    if layer.qkv is not None:
        qkv = x.new_empty(len(x), layer.qkv.outputs)
        links.append(link(layer.qkv, after, after.shape[1], None, qkv))
    fused_layer_small_batch_kernel[(programs,)](
        *zip(*links, strict=True), arrived(x.device), programs, **flags(layer),
        WIDTHS=listed(plan.widths), ACT=layer.up.fusion.gate, FORM=first.form, GROUP=first.group, SCALE=scale_name(first),
        ZERO=first.zero_kind, DEPTH=plan.depth, WARPS=tile.num_warps, BLOCKS=tile.blocks, ROWS=plan.rows, TOKENS=x.shape[0],
        num_warps=tile.num_warps, maxnreg=tile.registers, launch_cooperative_grid=True, **pdl_launch_options(x),
    )  # fmt: skip
    return after, qkv


def flags(layer: FusedLayer) -> dict[str, str]:
    """What a kernel is told of each linear."""
    gates = listed(linear.fusion.gate is not None for linear in layer.linears)
    biases = listed(linear.weight is not None and linear.weight.bias is not None for linear in layer.linears)
    return {"GATES": gates, "BIASES": biases}


def listed(numbers: Iterable[int]) -> str:
    return " ".join(str(int(number)) for number in numbers)


def _kind(weight: RowWeight) -> tuple[object, ...]:
    return weight.form, weight.zero_kind, weight.group, scale_name(weight), weight.weight.device


def _is_whole(weight: RowWeight) -> bool:
    """Tiles of 16 rows, also of a gated half, and blocks of 128 bytes; int4 in groups that a block has pairs of, with 16-bit scales.

    All that is copied in pieces of 16 bytes begins at such a place, as torch's allocations do.
    """
    stored, scale, zero = weight.weight, weight.scale, weight.zero
    whole = stored.shape[0] % 32 == 0 and weight.row_bytes % BLOCK == 0
    dense = stored.stride(1) == 1 and stored.stride(0) * stored.element_size() % 16 == 0 and stored.data_ptr() % 16 == 0
    if weight.form != "int4":
        return whole and dense
    if scale is None or any(grid is not None and (grid.data_ptr() % 16 or not grid.is_contiguous()) for grid in (scale, zero)):
        return False
    return whole and dense and scale.element_size() == 2 and scale.shape[0] == 2 * weight.row_bytes // weight.group


def _fits(layer: FusedLayer) -> bool:
    """Whether each linear does what its place in the kernel does."""
    norms = [linear.fusion for linear in (layer.up, layer.qkv) if linear is not None]
    plain = all(f.norm_kind == "rms" and f.norm_weight is not None and f.norm_bias is None for f in norms)
    return plain and layer.up.fusion.gate in ACTIVATIONS and all(f.input_gate is None for f in norms)


def _plan(layer: FusedLayer, tokens: int, programs: int, tile: SmallBatchTile) -> _Plan | None:
    """None where a program's rows are more than its threads, or shared memory has no room for a ring of two slots."""
    weights = [linear.weight for linear in layer.linears if linear.weight is not None]
    sizes = tuple((one.outputs, weight.weight.shape[0], weight.row_bytes) for one, weight in zip(layer.linears, weights, strict=True))
    return _planned(sizes, weights[0].form, weights[0].group, weights[0].zero_kind, tokens, programs, tile)


@cache
def _planned(
    sizes: tuple[tuple[int, int, int], ...], form: str, group: int, zero: str, tokens: int, programs: int, tile: SmallBatchTile
) -> _Plan | None:
    """Of each linear: outputs, rows and bytes of a row. Cached, since layers are alike, and a step that is no graph asks in every one."""
    widths, rows, together = [], 0, tile.num_warps * tile.blocks
    for outputs, weight_rows, row_bytes in sizes:
        mine = 16 * triton.cdiv(outputs // 16, programs)
        if mine > 32 * tile.num_warps:
            return None
        rows = max(rows, mine * (weight_rows // outputs))
        turns = triton.cdiv(row_bytes // BLOCK, together)
        widths.append(triton.next_power_of_2(turns * together * block_features(form)))
    rest = shared_places(form, group, zero, 0, tile.num_warps, tile.blocks, tuple(widths), rows, tokens)[-1] + REDUCTIONS
    slots = tile.num_warps * slot_bytes(group, zero, tile.blocks)
    depth = min(tile.ring, SHARED_BYTES - rest) // slots
    return _Plan(depth, rows, tuple(widths)) if depth >= 2 else None


def link(linear: FusedLinear, x: Tensor, k: int, residual: Tensor | None, out: Tensor | None) -> tuple[object, ...]:
    """A linear's part of a kernel's arguments, k its features: x stands for what it has not."""
    weight, fusion = linear.weight, linear.fusion
    assert weight is not None
    there = fusion.norm_weight, weight.scale, weight.zero, weight.bias, residual, out
    norm, scale, zero, bias, added, given = (x if t is None else t for t in there)
    stored = weight.weight
    return (
        x, norm, fusion.norm_eps, stored, scale, zero, bias, added, given,
        linear.outputs, k, stored.stride(0) * stored.element_size(), weight.row_bytes // BLOCK,
    )  # fmt: skip


def scale_name(weight: RowWeight) -> str:
    """As a constant of the kernel: no type's name in Triton (`ahead` says why)."""
    return "float" if weight.scale is None else {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(weight.scale.dtype, "float")


@cache
def arrived(device: torch.device) -> Tensor:
    """Where programs meet. Launches of one device run one after another."""
    return torch.zeros(1, dtype=torch.int32, device=device)
