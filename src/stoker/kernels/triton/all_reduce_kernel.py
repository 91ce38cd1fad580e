"""One unit of an all-reduce through inboxes: sent, awaited, summed in float32, and the residual added.

    out = Σ_ranks x + residual        x, residual, out [num_values]

With TOP_K > 0, x is computed from the results y of experts, as by `combine_kernel`: x[t] = Σ_i weights[t, i] × y[row of choice i of t].

Grid: one CTA per unit of UNIT values (2 KiB). Each rank has an inbox, a memory that its peers write to over NVLink. Every word of it holds
a bit pattern EMPTY (negative zero) until a message arrives, so a message is its own flag (as in TensorRT-LLM's Lamport all-reduce):

    inbox [TURNS, UNITS, SLOTS, UNIT]        slot r: the unit from rank r; two-shot has one more slot for the sum. Of a rank's own units,
                                             one-shot leaves the slot empty: they stay in registers
      turn 0 | unit 0: rank 0's | rank 1's | ... | (sum) |
             | unit 1: ...                                         kernel of turn n reads turn n % 3
      turn 1 | ...                                                 and resets turn (n - 1) % 3 to EMPTY

`turns` counts the turns of each unit on the device, so that captured graphs replay and messages of different sizes mix.

Theoretical floor: one-way latency of NVLink plus the bytes that a rank receives (one-shot: message × (ranks - 1)). Measured on four H200s,
when own units passed through the inbox: 128 KiB 3.8 µs one-shot, 256 KiB 6.1 µs two-shot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


class Choices(NamedTuple):
    """Pointers to what combines the results of experts. Both are None without experts."""

    weights_ptr: Any  # float32 [tokens, TOP_K]
    rows_ptr: Any  # int32 [tokens × TOP_K], the row of each choice; None: row c is choice c


@triton.jit
def _summand(x_ptr, choices, unit, values, inside, SIZE: tl.constexpr, TOP_K: tl.constexpr):
    """This rank's values of a unit. With TOP_K, the unit is a part of one row of SIZE features."""
    if TOP_K == 0:
        return tl.load(x_ptr + values, mask=inside, other=0.0)
    else:
        token = unit * values.shape[0] // SIZE
        cols = values - token * SIZE
        total = tl.zeros(values.shape, tl.float32)
        for i in tl.static_range(TOP_K):
            choice = token * TOP_K + i
            row = choice
            if choices.rows_ptr is not None:
                row = tl.load(choices.rows_ptr + choice)
            y = tl.load(x_ptr + row * SIZE + cols, mask=inside, other=0.0).to(tl.float32)
            total += y * tl.load(choices.weights_ptr + choice)
        return total.to(x_ptr.dtype.element_ty)


@triton.jit
def _message(values, BITS: tl.constexpr, EMPTY: tl.constexpr):
    """The bits of `values`, in which negative zero, which means EMPTY, is zero."""
    bits = values.to(BITS, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)


@triton.jit
def _send(bits, address, offset, cols, inside):
    """Write `bits` [UNIT] to the inbox at `address` (+ `offset` + `cols`)."""
    inbox_ptr = tl.multiple_of(address.to(tl.pointer_type(bits.dtype)), 16)
    tl.store(inbox_ptr + offset + cols, bits, mask=inside)


@triton.jit
def _reset(address, offset, cols, BITS: tl.constexpr, EMPTY: tl.constexpr):
    """Set the words `offset` + `cols` of the inbox at `address` to EMPTY."""
    inbox_ptr = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    tl.store(inbox_ptr + offset + cols, tl.full(cols.shape, EMPTY, BITS))


@triton.jit
def _receive(address, offsets, inside, BITS: tl.constexpr, EMPTY: tl.constexpr, max_polls):
    """The words at `offsets` of the inbox at `address`, loaded until none of them is EMPTY, or `max_polls` more times."""
    inbox_ptr = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    bits = tl.load(inbox_ptr + offsets, mask=inside, other=0, volatile=True)
    missing = tl.max((bits == EMPTY).to(tl.int32), axis=None)
    while (missing > 0) & (max_polls > 0):
        bits = tl.load(inbox_ptr + offsets, mask=inside, other=0, volatile=True)
        missing = tl.max((bits == EMPTY).to(tl.int32), axis=None)
        max_polls -= 1
    return bits


@triton.jit
def _receive_sum(
    bits,  # [UNIT]: this rank's unit
    address,
    offset,
    cols,
    inside,
    rank,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    max_polls,
):
    """float32 [UNIT]: the sum of one unit over all ranks, whose slots of the inbox follow one another from `offset`, in their order."""
    ranks = tl.arange(0, RANKS)[:, None]
    others = (ranks != rank) & inside[None, :]
    received = _receive(address, offset + ranks * UNIT + cols[None, :], others, BITS, EMPTY, max_polls)
    every = tl.where(ranks == rank, bits[None, :], received)
    return tl.sum(every.to(DTYPE, bitcast=True).to(tl.float32), axis=0)


@triton.jit(do_not_specialize=["rank", "max_polls"])
def all_reduce_kernel(
    # Pointers
    x_ptr,  # [num_values], or with TOP_K [choices, SIZE]
    choices,  # Choices
    residual_ptr,  # [num_values] or None
    out_ptr,  # [num_values]
    inboxes,  # tuple of int: the address of each rank's inbox
    own_inbox,  # int: the address of this rank's
    turns_ptr,  # int32 [UNITS]
    # Sizes
    rank,
    num_values,
    max_polls,
    # Constants
    UNIT: tl.constexpr,  # values of a unit
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,  # units of an inbox
    TWO_SHOT: tl.constexpr,
    BITS: tl.constexpr,  # the integer type of a value's bits
    EMPTY: tl.constexpr,
    TURNS: tl.constexpr,
    SIZE: tl.constexpr,  # features of a row, a multiple of UNIT with TOP_K
    TOP_K: tl.constexpr,  # choices of a token; 0: x is the summand
    USE_PDL: tl.constexpr,
):
    """One CTA: send a unit of x, wait for the units of the other ranks, and store their sum + residual in `out_ptr`.

    `inboxes`: the addresses of all ranks' inboxes; `own_inbox`: this rank's; `turns_ptr`: int32 [UNITS], the turn of each unit.
    """
    unit = tl.program_id(0)
    cols = tl.arange(0, UNIT)
    values = unit * UNIT + cols
    inside = values < num_values
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SLOTS: tl.constexpr = RANKS + (1 if TWO_SHOT else 0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    turn = tl.load(turns_ptr + unit, volatile=True)
    current = (turn * UNITS + unit) * (SLOTS * UNIT)  # the first slot of this turn's unit
    previous = ((turn + TURNS - 1) % TURNS * UNITS + unit) * (SLOTS * UNIT)
    bits = _message(_summand(x_ptr, choices, unit, values, inside, SIZE, TOP_K), BITS, EMPTY)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + values, mask=inside, other=0.0)
    if TWO_SHOT:
        owner = unit % RANKS
        address = inboxes[0]
        for peer in tl.static_range(1, RANKS):
            address = tl.where(owner == peer, inboxes[peer], address)
        _reset(own_inbox, previous + RANKS * UNIT, cols, BITS, EMPTY)
        if rank != owner:
            _send(bits, address, current + rank * UNIT, cols, inside)
        else:
            for source in range(RANKS):
                if source != rank:
                    _reset(own_inbox, previous + source * UNIT, cols, BITS, EMPTY)
            total = _receive_sum(bits, own_inbox, current, cols, inside, rank, UNIT, RANKS, DTYPE, BITS, EMPTY, max_polls)
            if residual_ptr is not None:
                total += residual.to(tl.float32)
            summed = _message(total.to(DTYPE), BITS, EMPTY)
            for peer in tl.static_range(RANKS):
                _send(summed, inboxes[peer], current + RANKS * UNIT, cols, inside)
        result = _receive(own_inbox, current + RANKS * UNIT + cols, inside, BITS, EMPTY, max_polls).to(DTYPE, bitcast=True)
    else:
        for peer in tl.static_range(RANKS):
            if peer != rank:
                _send(bits, inboxes[peer], current + rank * UNIT, cols, inside)
        for source in range(RANKS):
            if source != rank:
                _reset(own_inbox, previous + source * UNIT, cols, BITS, EMPTY)
        total = _receive_sum(bits, own_inbox, current, cols, inside, rank, UNIT, RANKS, DTYPE, BITS, EMPTY, max_polls)
        if residual_ptr is not None:
            total += residual.to(tl.float32)
        result = total.to(DTYPE)
    # After _receive, whose reduction synchronizes the CTA: every thread has read the turn.
    tl.store(turns_ptr + unit, (turn + 1) % TURNS)
    tl.store(out_ptr + values, result, mask=inside)
