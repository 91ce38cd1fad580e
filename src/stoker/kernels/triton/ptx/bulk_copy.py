"""Bulk copies from global to shared memory (`cp.async.bulk`), each completed by an mbarrier of its own.

A bulk copy is executed by the *async proxy*: it does not see earlier ordinary ("generic proxy") stores unless a proxy fence orders them
before it, even where a barrier does. `fence_global_for_bulk_copies` is that fence.

    thread 0:       mbarrier.arrive.expect_tx bytes   cp.async.bulk …  → complete_tx when the bytes have arrived
    every thread:   mbarrier.try_wait.parity 0        until the phase has ended: one arrival (thread 0's), and all bytes

An mbarrier is used for one copy per launch, so its phase is always 0.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import ptx, ptx_text

MBARRIER_BYTES = gl.constexpr(8)


@gluon.jit
def init_mbarriers(mbarriers, count, thread):
    """Initialize `count` contiguous mbarriers, each of which expects one arrival. Thread 0 does it; a CTA barrier must follow."""
    gl.inline_asm_elementwise(
        _INIT_MBARRIERS, "=r,r,r", [thread * 0 + mbarriers, thread * 0 + count], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_global_for_bulk_copies():
    """Order the stores to global memory that are visible to thread 0 before the bulk copies that it issues next.

    Call it after the grid barrier that makes the stores of all CTAs visible, and once for all copies, because it takes about 0.5 µs.
    """
    gl.inline_asm_elementwise(_FENCE_GLOBAL, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def issue_bulk_copy(target, source, mbarrier, thread, NUM_BYTES: gl.constexpr):
    """Issue the copy of NUM_BYTES from `source` (int64, global) to `target` (shared memory). Thread 0 does it."""
    code: gl.constexpr = _issue_bulk_copy(NUM_BYTES)
    arguments = [thread * 0 + target, thread.to(gl.int64) * 0 + source, thread * 0 + mbarrier]
    gl.inline_asm_elementwise(code, "=r,r,l,r", arguments, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_bulk_copy(mbarrier, thread):
    """Wait in every thread for the copy that completes `mbarrier`. Its bytes are then visible to wgmma and ordinary loads."""
    gl.inline_asm_elementwise(_WAIT_FOR_BULK_COPY, "=r,r", [thread * 0 + mbarrier], dtype=gl.int32, is_pure=False, pack=1)


_INIT_MBARRIERS = ptx(
    "{ .reg .pred p;",
    ".reg .b32 t, i, a;",
    "mov.u32 t, %tid.x;",
    "setp.ne.b32 p, t, 0;",
    "@p bra DONE;",  # thread 0 alone
    "mov.b32 i, 0;",
    "mov.b32 a, $1;",
    "AGAIN: mbarrier.init.shared.b64 [a], 1;",  # phase 0 ends after one arrival and the bytes that it expects
    "add.s32 a, a, 8;",
    "add.s32 i, i, 1;",
    "setp.lt.s32 p, i, $2;",
    "@p bra AGAIN;",
    "fence.proxy.async;",  # the initialized mbarriers are visible to the async proxy, which completes them
    "DONE: mov.u32 $0, t; }",
)

_FENCE_GLOBAL = ptx(
    "{ .reg .pred p;",
    ".reg .b32 t;",
    "mov.u32 t, %tid.x;",
    "setp.eq.b32 p, t, 0;",
    "@p fence.proxy.async.global;",  # generic-proxy stores that this thread sees → its later async-proxy reads
    "mov.b32 $0, $1; }",
)

_WAIT_FOR_BULK_COPY = ptx(
    "{ .reg .pred p;",
    "AGAIN: mbarrier.try_wait.parity.shared.b64 p, [$1], 0;",  # true once phase 0 has ended; may suspend the thread for a while
    "@!p bra AGAIN;",
    "mov.b32 $0, $1; }",
)


@triton.constexpr_function
def _issue_bulk_copy(num_bytes):
    """PTX of `issue_bulk_copy`. Operands: target $1, source $2, mbarrier $3."""
    return ptx_text(
        "{ .reg .pred p;",
        ".reg .b32 t;",
        "mov.u32 t, %tid.x;",
        "setp.eq.b32 p, t, 0;",
        f"@p mbarrier.arrive.expect_tx.shared.b64 _, [$3], {num_bytes};",  # the one arrival; the phase also waits for these bytes
        f"@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], {num_bytes}, [$3];",
        "mov.b32 $0, t; }",
    )
