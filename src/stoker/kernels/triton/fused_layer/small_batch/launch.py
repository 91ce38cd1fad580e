"""The launch of `tail_kernel`: a layer's tail for a few tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from stoker.kernels.quantized import RowWeight, Tail, TailLinear
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.fused_layer.small_batch.kernel import block_features, shared_places, tail_kernel
from stoker.kernels.triton.fused_layer.small_batch.schedule import slot_bytes
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES

BLOCK = BLOCK_BYTES.value // 16  # bytes of a row
MOST = 4  # tokens: a matrix instruction's eight columns
SHARED_BYTES = 227 << 10  # of one program
REDUCTIONS = 2 << 10  # of them, Triton's own, and what is lost to whole kilobytes


@dataclass(frozen=True, slots=True)
class TailTile:
    """How a program's warps share a tile of 16 rows, and how far ahead they ask."""

    num_warps: int
    blocks: int  # of 128 bytes of each row that a warp takes at a time
    ring: int  # bytes of all warps' rings
    registers: int  # of a thread: what is left is for the kernel before, which runs while rings fill
    most: int  # tokens: with more, making their codes takes longer than it saves


# Measured on one H200 in steps of Llama-3.1-8B's shapes (benchmarks/results/h200_tails.json); int4 in groups of 128.
TILES = {
    "bfloat16": TailTile(8, 1, 96 << 10, 168, 4), "float16": TailTile(8, 1, 96 << 10, 168, 4), "fp8": TailTile(8, 1, 96 << 10, 168, 4),
    "bytes": TailTile(8, 1, 112 << 10, 168, 2), "int4": TailTile(8, 1, 64 << 10, 168, 3),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the kernel is compiled for."""

    depth: int
    rows: int  # the most of a program
    widths: tuple[int, ...]


def takes(tail: Tail, rows: int) -> bool:
    """Whether `tail_few` is for these weights, which `are_alike`: a program has room for the rows' codes."""
    first = tail.out.weight
    assert first is not None
    tile = TILES[first.form]
    return rows <= tile.most and _plan(tail, rows, num_sms(first.weight.device), tile) is not None


def are_alike(tail: Tail) -> bool:
    """Whether these are four weights of one form on one device, in whole blocks and tiles, and each linear does what its place asks for."""
    weights = [linear.weight for linear in tail.linears]
    first = weights[0]
    if first is None or not supports(first.weight, "fused_layer") or first.form not in TILES:
        return False
    return all(w is not None and _kind(w) == _kind(first) and _is_whole(w) for w in weights) and _fits(tail)


def tail_few(x: Tensor, stream: Tensor, parts: Tail, tile: TailTile | None = None) -> tuple[Tensor, Tensor | None]:
    """`ops.tail` of MOST rows and fewer.

    All programs must be on the device at once, so the launch is a cooperative one: where processes share a device, half of a grid must not
    wait there for the other half. Without it a step is up to 2 % faster, since programs come in one by one while attention still runs.
    """
    assert x.shape[0] <= MOST and x.is_contiguous() and stream.is_contiguous()
    first = parts.out.weight
    assert first is not None
    tile, programs = tile or TILES[first.form], num_sms(x.device)
    plan = _plan(parts, x.shape[0], programs, tile)
    assert plan is not None
    middle, inner, after = torch.empty_like(stream), x.new_empty(len(x), parts.up.outputs), torch.empty_like(stream)
    links = [
        link(parts.out, x, x.shape[1], stream, middle),
        link(parts.up, middle, middle.shape[1], None, inner),
        link(parts.down, inner, inner.shape[1], middle, after),
    ]
    qkv = None
    if parts.qkv is not None:
        qkv = x.new_empty(len(x), parts.qkv.outputs)
        links.append(link(parts.qkv, after, after.shape[1], None, qkv))
    tail_kernel[(programs,)](
        *zip(*links, strict=True), arrived(x.device), programs, **flags(parts),
        WIDTHS=listed(plan.widths), ACT=parts.up.fusion.gate, FORM=first.form, GROUP=first.group, SCALE=scale_name(first),
        ZERO=first.zero_kind, DEPTH=plan.depth, WARPS=tile.num_warps, BLOCKS=tile.blocks, ROWS=plan.rows, TOKENS=x.shape[0],
        num_warps=tile.num_warps, maxnreg=tile.registers, launch_cooperative_grid=True, **pdl_launch_options(x),
    )  # fmt: skip
    return after, qkv


def flags(parts: Tail) -> dict[str, str]:
    """What a kernel is told of each linear."""
    gates = listed(linear.fusion.gate is not None for linear in parts.linears)
    biases = listed(linear.weight is not None and linear.weight.bias is not None for linear in parts.linears)
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


def _fits(tail: Tail) -> bool:
    """Whether each linear does what its place in the kernel does."""
    norms = [linear.fusion for linear in (tail.up, tail.qkv) if linear is not None]
    plain = all(f.norm_kind == "rms" and f.norm_weight is not None and f.norm_bias is None for f in norms)
    return plain and tail.up.fusion.gate in ACTIVATIONS and all(f.input_gate is None for f in norms)


def _plan(tail: Tail, tokens: int, programs: int, tile: TailTile) -> _Plan | None:
    """None where a program's rows are more than its threads, or shared memory has no room for a ring of two slots."""
    weights = [linear.weight for linear in tail.linears if linear.weight is not None]
    sizes = tuple((one.outputs, weight.weight.shape[0], weight.row_bytes) for one, weight in zip(tail.linears, weights, strict=True))
    return _planned(sizes, weights[0].form, weights[0].group, weights[0].zero_kind, tokens, programs, tile)


@cache
def _planned(
    sizes: tuple[tuple[int, int, int], ...], form: str, group: int, zero: str, tokens: int, programs: int, tile: TailTile
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


def link(linear: TailLinear, x: Tensor, k: int, residual: Tensor | None, out: Tensor | None) -> tuple[object, ...]:
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
