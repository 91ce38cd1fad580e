"""The all-reduce inside the small-batch kernel: the partial sums of `out_proj` and `down` are added over tensor-parallel ranks.

Each rank has a shard of the input features of both linears, so its results are summands. All ranks have the same schedule: CTA i computes
the same rows of the same tokens everywhere. So it exchanges data with CTAs i of the other ranks only, through one unit of the inboxes of
fused layers (`distributed.inbox`):

    unit i of an inbox, 2 KiB per rank       float32 [tokens, rows of CTA i]
      slot 0: from rank 0 | slot 1: from rank 1 | …

    CTA i of each rank     store the partial sums in slot `rank` of all inboxes | reset the buffer of the previous turn
                           | load all slots until no word is EMPTY | add them in the order of the ranks, then the residual

The protocol is that of `all_reduce_kernel`: a word is its own flag, the buffers of a unit rotate, and its turns are counted on the device,
so that captured graphs can be replayed. One launch takes two turns. Between them, the grid barriers order the stores that reset a buffer
before the partial sums of the second turn, whose arrival allows a peer to write to that buffer. A rank whose peer has died polls as long
as the all-reduce kernel does (`UNLIMITED_POLLS`), unless its process is stopped.

Sums are float32, and all ranks add the same values in the same order, so that x has the same bits on all of them.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.distributed.inbox import EMPTY as EMPTY_WORD
from stoker.distributed.inbox import TURNS as NUM_TURNS
from stoker.distributed.inbox import UNIT_BYTES
from stoker.kernels.triton.fused_layer.small_batch.schedule import tiles_of_cta
from stoker.kernels.triton.ptx.registers import int32_registers, ptx_text

EMPTY = triton.language.constexpr(EMPTY_WORD)
TURNS = triton.language.constexpr(NUM_TURNS)
UNIT_WORDS = triton.language.constexpr(UNIT_BYTES // 4)


class Ranks(NamedTuple):
    """The kernel arguments of the all-reduces. All are None on a single rank."""

    inboxes: Any  # tuple of int: the address of each rank's inbox
    own_inbox: Any  # int: the address of this rank's
    turns_ptr: Any  # int32 [UNITS]
    rank: Any
    max_polls: Any  # loads after which a CTA gives up waiting for its peers; its results are undefined then
    UNITS: Any  # units of an inbox


@gluon.jit
def load_turn(ranks, INDEX: gl.constexpr):
    """The turn (0, 1 or 2) in which this CTA's unit is used after linear number INDEX (0 or 2).

    The counter is the same during the whole launch; `advance_turns` adds both turns at the end.
    """
    turn = gl.load(ranks.turns_ptr + gl.program_id(0), volatile=True)
    return (turn + INDEX // 2) % TURNS


@gluon.jit
def advance_turns(ranks, turn, has_rows):
    """Store the turn of the next launch, where `turn` is the second one of this launch. Units of CTAs without rows are not used."""
    gl.store(ranks.turns_ptr + gl.program_id(0), (turn + 1) % TURNS, mask=has_rows)


@gluon.jit
def sum_over_ranks(partials, ranks, turn, n, num_ctas, thread, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """The sums over all ranks of `partials`, a tuple with a float32 register per token: thread i has row i of this CTA's rows.

    `turn` is a result of `load_turn`, n the number of output features, and ROWS the largest number of rows of a CTA.
    """
    RANKS: gl.constexpr = len(ranks.inboxes)
    TOKENS: gl.constexpr = len(partials)
    _, num_tiles = tiles_of_cta(n, num_ctas)
    mask = thread < num_tiles * 16
    unit = gl.program_id(0)
    current = (turn * ranks.UNITS + unit) * (RANKS * UNIT_WORDS)  # the first word of this turn's buffer
    previous = ((turn + TURNS - 1) % TURNS * ranks.UNITS + unit) * (RANKS * UNIT_WORDS)
    for peer in gl.static_range(RANKS):
        slot_ptr = ranks.inboxes[peer].to(gl.pointer_type(gl.int32)) + (current + ranks.rank * UNIT_WORDS) + thread
        for token in gl.static_range(TOKENS):
            bits = partials[token].to(gl.int32, bitcast=True)
            gl.store(slot_ptr + token * ROWS, gl.where(bits == EMPTY, 0, bits), mask=mask)
    own_ptr = ranks.own_inbox.to(gl.pointer_type(gl.int32))
    words = gl.arange(0, RANKS * UNIT_WORDS, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    gl.store(gl.multiple_of(own_ptr + previous, 16) + words, gl.full_like(words, EMPTY), mask=(words >= 0) & (num_tiles > 0))
    received = receive(own_ptr + current + thread, mask, ranks.max_polls, TOKENS, ROWS, RANKS)
    sums = ()
    for token in gl.static_range(TOKENS):
        total = received[token].to(gl.float32, bitcast=True)
        for source in gl.static_range(1, RANKS):
            total += received[source * TOKENS + token].to(gl.float32, bitcast=True)
        sums = sums + (total,)
    return sums


@gluon.jit
def receive(slots_ptr, mask, max_polls, TOKENS: gl.constexpr, ROWS: gl.constexpr, RANKS: gl.constexpr):
    """The words of all ranks' slots for each token, int32 registers [rank, token], loaded until none of them is EMPTY.

    `slots_ptr` points to each thread's word of token 0 in slot 0. Zeros where `mask` is false. Each thread polls on its own, and all its
    loads are in flight together: one after another they would take 0.7 µs each.
    """
    COUNT: gl.constexpr = RANKS * TOKENS
    code: gl.constexpr = _receive_code(TOKENS, ROWS, RANKS)
    types: gl.constexpr = int32_registers(COUNT)
    active = mask.to(gl.int32)
    return gl.inline_asm_elementwise(
        code, "=&r," * COUNT + "l,r,r", [slots_ptr.to(gl.int64), active, active * 0 + max_polls], dtype=types, is_pure=False, pack=1
    )


@triton.constexpr_function
def _receive_code(tokens, rows, num_ranks):
    """PTX of `receive`: results [rank, token], then the address, the mask and the number of polls."""
    words = [
        (f"${rank * tokens + token}", 4 * (rank * UNIT_WORDS.value + token * rows)) for rank in range(num_ranks) for token in range(tokens)
    ]
    address, active, polls = (f"${len(words) + i}" for i in range(3))
    return ptx_text(
        "{ .reg .pred p;",
        ".reg .b32 n;",
        f"mov.b32 n, {polls};",
        *(f"mov.b32 {word}, 0;" for word, _ in words),
        f"setp.eq.s32 p, {active}, 0;",
        "@p bra DONE;",
        "AGAIN:",
        *(f"ld.relaxed.sys.global.b32 {word}, [{address} + {offset}];" for word, offset in words),
        f"setp.eq.s32 p, {words[0][0]}, {EMPTY.value};",
        *(f"setp.eq.or.s32 p, {word}, {EMPTY.value}, p;" for word, _ in words[1:]),  # p: a word has not arrived
        "setp.gt.and.s32 p, n, 0, p;",
        "sub.s32 n, n, 1;",
        "@p bra AGAIN;",
        "DONE: }",
    )
