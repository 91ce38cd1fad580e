"""Sums over ranks through inboxes (`distributed.inbox`), with the residual add and the norm in the same kernel.

A program has one unit of the message: a row when it is normed, else UNIT_BYTES. One-shot: it sends its part to every rank and sums what
arrives. Two-shot: parts go to the unit's owner, which sums them and sends the sum to every rank; less is sent, with one trip more.
Every rank has the same bits: one-shot sums in the same order everywhere, two-shot once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.distributed.group import Group
from stoker.distributed.inbox import EMPTY, TURNS, UNIT_BYTES, Inbox, Inboxes
from stoker.kernels.reference import all_reduce as reference
from stoker.kernels.triton import norm as norms
from stoker.kernels.triton.chain import chained, let_next_start, wait_for_previous

log = get_logger(__name__)

FOR_EVER = (1 << 31) - 1
CHECK_LOOKS = 1 << 22  # about two seconds
MOST_WARPS = 16
MOST_BYTES = 1 << 16  # a quarter of a multiprocessor's registers, for parts that one program waits for together
MOST_ROW_BYTES = 1 << 14  # wider rows spill: they are summed in pieces, and normed after that
BITS = {2: tl.int16, 4: tl.int32}  # what holds a value's bits, by its size
EMPTY_HALF = -(1 << 15)  # EMPTY is this, twice


@triton.jit
def _send(bits, address, offset, cols, inside, EMPTY: tl.constexpr):
    """Write to a rank's inbox. What would mean an empty place is zero instead."""
    there = tl.multiple_of(address.to(tl.pointer_type(bits.dtype)), 16)
    tl.store(there + offset + cols, tl.where(bits == EMPTY, 0, bits), mask=inside)


@triton.jit
def _empty(address, offset, cols, UNIT: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr):
    here = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    tl.store(here + offset + cols, tl.full(cols.shape, EMPTY, BITS), mask=cols < UNIT)


@triton.jit
def _receive(address, offsets, inside, BITS: tl.constexpr, EMPTY: tl.constexpr, patience):
    """What has arrived at `offsets`, once all of it has, or after `patience` looks."""
    here = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    bits = tl.load(here + offsets, mask=inside, other=0, volatile=True)
    missing = tl.max((bits == EMPTY).to(tl.int32), axis=None)
    while (missing > 0) & (patience > 0):
        bits = tl.load(here + offsets, mask=inside, other=0, volatile=True)
        missing = tl.max((bits == EMPTY).to(tl.int32), axis=None)
        patience -= 1
    return bits


@triton.jit
def _sum(address, offset, cols, inside, UNIT: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
         DTYPE: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, patience):  # fmt: skip
    """The ranks' parts, which lie one after another, summed in their order as float32. GROUP of them are waited for together."""
    sources = tl.arange(0, GROUP)[:, None]
    total = tl.zeros(cols.shape, tl.float32)
    for first in range(0, RANKS, GROUP):
        offsets = offset + (first + sources) * UNIT + cols[None, :]
        bits = _receive(address, offsets, (sources >= 0) & inside[None, :], BITS, EMPTY, patience)
        total += tl.sum(bits.to(DTYPE, bitcast=True).to(tl.float32), axis=0)
    return total


@triton.jit(do_not_specialize=["rank", "patience"])
def exchange_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    stream,
    peers,
    mine,
    turns,
    rank,
    num_values,
    eps,
    patience,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    TURNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One unit of UNIT values, program_id(0)'s, of a message of `num_values`. `peers`: each rank's inbox; `mine`: this one's."""
    unit = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    places = unit * UNIT + cols
    inside = (cols < UNIT) & (places < num_values)
    DTYPE: tl.constexpr = x.dtype.element_ty
    SLOTS: tl.constexpr = RANKS + (1 if TWO_SHOT else 0)
    if weight is not None:
        scale = tl.load(weight + cols, mask=cols < UNIT, other=0.0)  # no kernel writes it: before the wait
    wait_for_previous(CHAINED)
    let_next_start(CHAINED)
    turn = tl.load(turns + unit, volatile=True)
    now = (turn * UNITS + unit) * (SLOTS * UNIT)
    before = ((turn + TURNS - 1) % TURNS * UNITS + unit) * (SLOTS * UNIT)
    bits = tl.load(x + places, mask=inside, other=0.0).to(BITS, bitcast=True)
    if residual is not None:
        added = tl.load(residual + places, mask=inside, other=0.0)
    if TWO_SHOT:
        owner = unit % RANKS
        address = peers[0]
        for peer in tl.static_range(1, RANKS):
            address = tl.where(owner == peer, peers[peer], address)
        _send(bits, address, now + rank * UNIT, cols, inside, EMPTY)
        _empty(mine, before + RANKS * UNIT, cols, UNIT, BITS, EMPTY)
        if rank == owner:
            for source in range(RANKS):
                _empty(mine, before + source * UNIT, cols, UNIT, BITS, EMPTY)
            total = _sum(mine, now, cols, inside, UNIT, RANKS, GROUP, DTYPE, BITS, EMPTY, patience)
            if residual is not None:
                total += added.to(tl.float32)
            summed = total.to(DTYPE).to(BITS, bitcast=True)
            for peer in tl.static_range(RANKS):
                _send(summed, peers[peer], now + RANKS * UNIT, cols, inside, EMPTY)
        stored = _receive(mine, now + RANKS * UNIT + cols, inside, BITS, EMPTY, patience).to(DTYPE, bitcast=True)
    else:
        for peer in tl.static_range(RANKS):
            _send(bits, peers[peer], now + rank * UNIT, cols, inside, EMPTY)
        for source in range(RANKS):
            _empty(mine, before + source * UNIT, cols, UNIT, BITS, EMPTY)
        total = _sum(mine, now, cols, inside, UNIT, RANKS, GROUP, DTYPE, BITS, EMPTY, patience)
        if residual is not None:
            total += added.to(tl.float32)
        stored = total.to(DTYPE)
    # After _receive, whose reduction no thread passes before all have read the turn.
    tl.store(turns + unit, (turn + 1) % TURNS)
    tl.store(stream + places, stored, mask=inside)
    if NORM is not None:
        wide = tl.where(inside, stored.to(tl.float32), 0.0)
        if NORM == "layer":
            wide = tl.where(inside, wide - tl.sum(wide, axis=0) / UNIT, 0.0)
        wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / UNIT + eps))
        if weight is not None:
            wide = wide * scale.to(tl.float32)
        if bias is not None:
            wide = wide + tl.load(bias + cols, mask=cols < UNIT, other=0.0).to(tl.float32)
        tl.store(out + places, wide.to(DTYPE), mask=inside)


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """See `ops.all_reduce`."""
    inbox = group.inbox(x.numel() * x.element_size())
    if inbox is None or x.element_size() not in BITS:
        return reference.all_reduce(x, group, residual)
    return exchange(x, residual, inbox)[1]


def all_reduce_norm(
    x: Tensor, group: Group, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """See `ops.all_reduce_norm`."""
    row_bytes = x.shape[-1] * x.element_size()
    inbox = group.inbox(x.numel() * x.element_size(), row_bytes) if row_bytes <= MOST_ROW_BYTES else None
    if inbox is None or x.element_size() not in BITS:
        return norms.add_norm(all_reduce(x, group), residual, weight, bias, eps, kind)
    return exchange(x, residual, inbox, weight, bias if kind == "layer" else None, eps, kind)


def exchange(
    x: Tensor, residual: Tensor | None, inbox: Inbox, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0,
    kind: str | None = None, patience: int = FOR_EVER,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the norm of the second, with `kind`; the ranks' x summed, + residual). Sums that do not arrive in time are garbage."""
    x = x.contiguous()
    stream = torch.empty_like(x)
    out = torch.empty_like(x) if kind is not None else stream
    num_values, bits = x.numel(), BITS[x.element_size()]
    if num_values == 0:
        return out, stream
    size = x.element_size()
    unit = inbox.unit_bytes // size
    block = triton.next_power_of_2(unit)
    exchange_kernel[(triton.cdiv(num_values, unit),)](
        x, residual if residual is None else residual.contiguous(), weight, bias, out, stream,
        inbox.addresses, inbox.addresses[inbox.rank], inbox.turns, inbox.rank, num_values, eps, patience,
        UNIT=unit, BLOCK=block, RANKS=inbox.num_ranks, GROUP=min(inbox.num_ranks, max(MOST_BYTES // (block * size), 1)),
        UNITS=inbox.num_units, TWO_SHOT=inbox.is_two_shot, NORM=kind, BITS=bits, EMPTY=EMPTY if bits is tl.int32 else EMPTY_HALF,
        TURNS=TURNS, num_warps=min(MOST_WARPS, max(4, block * size // 512)), **chained(x),
    )  # fmt: skip
    return out, stream


def check_inboxes(group: Group) -> None:
    """Leave a group's inboxes unused where sums through them do not arrive or are wrong. Every rank calls it once, at start."""
    for looks in (0, CHECK_LOOKS):  # a rank that still compiles is not waited for with patience
        if group.inboxes is None:
            return
        try:
            good, reason = sums_arrive(group.inboxes, group.device, looks), "sums through them are wrong"
        except Exception as error:  # a driver or a compiler that cannot: whatever it is, NCCL can
            good, reason = False, str(error)
        if not group.smallest(good):
            log.warning("peers' inboxes are not used: %s", "another rank's do not work" if good else reason)
            group.inboxes = None


def sums_arrive(inboxes: Inboxes, device: torch.device, looks: int) -> bool:
    """Whether this rank gets the right sums both ways, turn after turn, within so many looks. 0: only compile, and wait for nobody."""
    ranks = inboxes.num_ranks
    values = torch.arange(UNIT_BYTES * 3 // 4, device=device) % 16  # a unit and a half, of sums that bfloat16 holds
    wanted = (values * ranks + (ranks - 1) * ranks // 2).float()
    for is_two_shot in (False, True):
        inbox = inboxes.get(UNIT_BYTES, is_two_shot)
        assert inbox is not None
        for _ in range(2 * TURNS if looks else 1):
            found = exchange((values + inboxes.rank).bfloat16(), None, inbox, patience=looks)[1]
            if looks and not torch.equal(found.float(), wanted):
                return False
    return True
