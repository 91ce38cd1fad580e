"""The launch of `fused_layer_large_batch_kernel`: the fused layer for some tokens, against int4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from stoker.kernels.quantized import FusedLayer
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.fused_layer.large_batch.kernel import fused_layer_large_batch_kernel, shared_places
from stoker.kernels.triton.fused_layer.large_batch.schedule import GROUPS, TILE, WARPS, slot_bytes
from stoker.kernels.triton.fused_layer.small_batch.launch import BLOCK, SHARED_BYTES, arrived, flags, link, listed, scale_name
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.triton.ptx.wgmma import block_bytes

FEWEST, MOST = 3, 64  # tokens: `run_small_batch` is faster with fewer (benchmarks/results/h200_tail_rows.json)
MOST_PARTS, DEEPEST = 32, 4
TRITONS = 1 << 10  # bytes of shared memory that Triton may take itself
REGISTERS = 128  # of a thread: 16 warps have no more


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernel is compiled for."""

    tokens: int  # a power of two
    parts: tuple[int, ...]  # of each linear's features
    share: int  # the most blocks of a part
    depth: int  # of the rings


def supports_large_batch(layer: FusedLayer, rows: int) -> bool:
    """Whether the kernel takes `rows` rows of a layer that `is_uniform`: int4, whose outputs are whole blocks of the next linear."""
    first, norms = layer.out.weight, [linear.fusion.norm_weight for linear in (layer.up, layer.qkv) if linear is not None]
    if first is None or first.form != "int4" or not FEWEST <= rows <= MOST or any(norm.dtype != torch.bfloat16 for norm in norms):
        return False
    given = [linear.outputs for linear in layer.linears]
    wanted = [2 * linear.weight.weight.shape[1] for linear in layer.linears[1:] if linear.weight is not None]
    whole = given[: len(wanted)] == wanted and all(
        linear.weight.weight.shape[0] % TILE.value == 0 for linear in layer.linears if linear.weight
    )
    return whole and plan_of(layer, rows, num_sms(first.weight.device)) is not None


def run_large_batch(x: Tensor, residual: Tensor, layer: FusedLayer, plan: Plan | None = None) -> tuple[Tensor, Tensor | None]:
    """`ops.fused_layer` of FEWEST to MOST rows of bfloat16.

    All programs must be on the device at once, so the launch is a cooperative one, as that of one row.
    """
    (m, hidden), programs = residual.shape, num_sms(x.device)
    plan = plan or plan_of(layer, m, programs)
    assert plan is not None
    size = layer.up.outputs
    middle, after = torch.empty_like(residual), torch.empty_like(residual)
    operands = [x.new_empty(features * plan.tokens) for features in (hidden, size, hidden)]
    links = [
        link(layer.out, x, x.shape[1], residual, middle),
        link(layer.up, operands[0], hidden, None, None),
        link(layer.down, operands[1], size, middle, after),
    ]
    qkv = None
    if layer.qkv is not None:
        qkv = x.new_empty(m, layer.qkv.outputs)
        links.append(link(layer.qkv, operands[2], hidden, None, qkv))
    sizes = _sizes(layer)
    messages = _messages(x.device, max(_words(sizes, plan), _most_words(sizes, _group(layer), programs)))
    squares = torch.empty(hidden // 16 * plan.tokens, dtype=torch.float32, device=x.device)
    weight = layer.out.weight
    assert weight is not None
    fused_layer_large_batch_kernel[(programs,)](
        *zip(*links, strict=True), messages, squares, arrived(x.device), programs, m, **flags(layer),
        PARTS=listed(plan.parts), ACT=layer.up.fusion.gate, SCALE=scale_name(weight), ZERO=weight.zero_kind,
        DEPTH=plan.depth, TOKENS=plan.tokens, SHARE=plan.share, GROUP=weight.group,
        num_warps=WARPS.value, maxnreg=REGISTERS, launch_cooperative_grid=True, **pdl_launch_options(x),
    )  # fmt: skip
    return after, qkv


def plan_of(layer: FusedLayer, rows: int, programs: int) -> Plan | None:
    """None where shared memory has no room for a ring of two slots."""
    return _planned(_sizes(layer), _group(layer), max(8, triton.next_power_of_2(rows)), programs)


def plan_with(layer: FusedLayer, tokens: int, parts: tuple[int, ...]) -> Plan | None:
    """The same with the features cut so."""
    return _cut(_sizes(layer), _group(layer), tokens, parts)


@cache
def _planned(sizes: tuple[tuple[int, int], ...], group: int, tokens: int, programs: int) -> Plan | None:
    """Cached, since layers are alike, and a step that is no graph asks in every one of them."""
    most = max((count for count in range(1, 257) if _depth(tokens, count, group) >= 2), default=0)
    parts = tuple(_parts(tiles, blocks, tokens, programs, most, nth == 0) for nth, (tiles, blocks) in enumerate(sizes))
    return _cut(sizes, group, tokens, parts) if all(parts) else None


def _cut(sizes: tuple[tuple[int, int], ...], group: int, tokens: int, parts: tuple[int, ...]) -> Plan | None:
    share = max(triton.cdiv(blocks, each) for (_, blocks), each in zip(sizes, parts, strict=True))
    depth = min(_depth(tokens, share, group), DEEPEST)
    return Plan(tokens, parts, share, depth) if depth >= 2 else None


def _depth(tokens: int, share: int, group: int) -> int:
    """The slots of a ring that shared memory has room for beside the tokens of so many blocks."""
    return int(SHARED_BYTES - TRITONS - shared_places(0, tokens, share, group)[-1]) // (WARPS.value * slot_bytes(group))


def _parts(tiles: int, blocks: int, tokens: int, programs: int, most: int, is_first: bool) -> int:
    """Into how many parts to cut a linear's features, of which no program takes more than `most` blocks; 0: none will do.

    By what was measured on an H200 with Llama-3.1-8B's shapes: a block of each of its four groups takes a program 1.2 µs, tokens and sums
    come at 32 KB a µs, and nothing else happens while the first linear's tokens are made an operand. Sums are written, read, and go to
    memory when their place in the cache is needed.
    """

    def cost(parts: int) -> float:
        share, mine = triton.cdiv(blocks, parts), triton.cdiv(tiles, programs // parts)
        turns = max(triton.cdiv(mine * share, GROUPS.value), share)
        brought = (3 if is_first else 1) * share * block_bytes(tokens)
        return 1.2 * turns + (brought + 3.5 * mine * 256 * tokens) / 32e3

    whole = [parts for parts in range(1, min(blocks, MOST_PARTS, programs) + 1) if triton.cdiv(blocks, triton.cdiv(blocks, parts)) == parts]
    return min((parts for parts in whole if triton.cdiv(blocks, parts) <= most), key=cost, default=0)


def _group(layer: FusedLayer) -> int:
    assert layer.out.weight is not None
    return layer.out.weight.group


def _sizes(layer: FusedLayer) -> tuple[tuple[int, int], ...]:
    """(tiles, blocks of a row) of each weight."""
    shapes = (linear.weight.weight.shape for linear in layer.linears if linear.weight is not None)
    return tuple((n // TILE.value, size // BLOCK) for n, size in shapes)


def _words(sizes: tuple[tuple[int, int], ...], plan: Plan) -> int:
    """Of messages: for the linear with the most parts of tiles, each in two pieces."""
    return max(tiles * parts for (tiles, _), parts in zip(sizes, plan.parts, strict=True)) * 2 * TILE.value * plan.tokens


@cache
def _most_words(sizes: tuple[tuple[int, int], ...], group: int, programs: int) -> int:
    """For any number of tokens: one place serves them all, 59 MB with Llama-3.1-8B's shapes."""
    plans = (_planned(sizes, group, tokens, programs) for tokens in (8, 16, 32, MOST))
    return max(_words(sizes, plan) for plan in plans if plan is not None)


@cache
def _messages(device: torch.device, count: int) -> Tensor:
    """What programs send each other: every launch leaves it at zero. Launches of one device run one after another."""
    return torch.zeros(count, dtype=torch.float32, device=device)
