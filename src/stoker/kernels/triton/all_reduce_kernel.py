"""One unit of a sum over ranks: sent, waited for, summed, and the residual added. See `all_reduce`."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def _send(bits, address, offset, cols, inside, EMPTY: tl.constexpr):
    """Write to a rank's inbox. What would mean an empty place is zero instead."""
    there = tl.multiple_of(address.to(tl.pointer_type(bits.dtype)), 16)
    tl.store(there + offset + cols, tl.where(bits == EMPTY, 0, bits), mask=inside)


@triton.jit
def _empty(address, offset, cols, BITS: tl.constexpr, EMPTY: tl.constexpr):
    here = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    tl.store(here + offset + cols, tl.full(cols.shape, EMPTY, BITS))


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
def _sum(address, offset, cols, inside, UNIT: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
         EMPTY: tl.constexpr, patience):  # fmt: skip
    """The ranks' parts, which lie one after another, waited for together and summed as float32."""
    sources = tl.arange(0, RANKS)[:, None]
    bits = _receive(address, offset + sources * UNIT + cols[None, :], (sources >= 0) & inside[None, :], BITS, EMPTY, patience)
    return tl.sum(bits.to(DTYPE, bitcast=True).to(tl.float32), axis=0)


@triton.jit(do_not_specialize=["rank", "patience"])
def exchange_kernel(
    x,
    residual,
    out,
    peers,
    mine,
    turns,
    rank,
    num_values,
    patience,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    TURNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One unit of UNIT values, program_id(0)'s, of a message of `num_values`. `peers`: each rank's inbox; `mine`: this one's."""
    unit = tl.program_id(0)
    cols = tl.arange(0, UNIT)
    places = unit * UNIT + cols
    inside = places < num_values
    DTYPE: tl.constexpr = x.dtype.element_ty
    SLOTS: tl.constexpr = RANKS + (1 if TWO_SHOT else 0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
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
        _empty(mine, before + RANKS * UNIT, cols, BITS, EMPTY)
        if rank == owner:
            for source in range(RANKS):
                _empty(mine, before + source * UNIT, cols, BITS, EMPTY)
            total = _sum(mine, now, cols, inside, UNIT, RANKS, DTYPE, BITS, EMPTY, patience)
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
            _empty(mine, before + source * UNIT, cols, BITS, EMPTY)
        total = _sum(mine, now, cols, inside, UNIT, RANKS, DTYPE, BITS, EMPTY, patience)
        if residual is not None:
            total += added.to(tl.float32)
        stored = total.to(DTYPE)
    # After _receive, whose reduction no thread passes before all have read the turn.
    tl.store(turns + unit, (turn + 1) % TURNS)
    tl.store(out + places, stored, mask=inside)
