"""Synchronization: within a warp, within a CTA, between all CTAs of a grid, and between kernels.

Grid barrier (`grid_barrier`): as the grid synchronization of CUDA's cooperative groups, with one int32 counter that is never reset. CTA 0
adds 2^31 - (n - 1), the other n - 1 CTAs add 1, so the sum of all is 2^31: the counter's highest bit flips when the last CTA has arrived.

    CTA 0            bar.sync | atom.add 2^31 - (n - 1)  ld.acquire … until bit 31 has flipped | bar.sync
    CTA 1 … n - 1    bar.sync | atom.add 1               ld.acquire … until bit 31 has flipped | bar.sync
                     ^ all threads' stores precede the atomic of thread 0 (release)               ^ its load (acquire) precedes all loads

All CTAs must be resident at the same time, so the launch must be cooperative.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import ptx

cta_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # the name until Triton 3.6, and the name since


@gluon.jit
def warp_barrier(lane):
    """Wait for all lanes of the warp. Their accesses of shared memory before the barrier are ordered before those after it."""
    gl.inline_asm_elementwise(_WARP_BARRIER, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_barrier(counter_ptr, num_ctas, is_first, thread):
    """Wait for all `num_ctas` CTAs, of which exactly one passes `is_first` = True. The stores of each are then visible to all.

    `counter_ptr`: int32 [1], zero at first. Launches that share it must run one after another.
    """
    cta_barrier()
    increment = gl.where(is_first, 2147483647 - (num_ctas - 2), 1)
    gl.inline_asm_elementwise(
        _GRID_BARRIER,
        "=r,l,r",
        [thread.to(gl.int64) * 0 + counter_ptr.to(gl.int64), thread * 0 + increment],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    cta_barrier()


@gluon.jit
def pdl_wait_and_launch_dependents(thread, USE_PDL: gl.constexpr):
    """Wait for the previous kernel in the stream, then allow the next one to start; see `stoker.kernels.triton.pdl`."""
    if USE_PDL:
        gl.inline_asm_elementwise(_PDL_WAIT_AND_LAUNCH_DEPENDENTS, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


_WARP_BARRIER = ptx(
    "bar.warp.sync 0xffffffff;",
    "mov.b32 $0, $1;",
)

_GRID_BARRIER = ptx(
    "{ .reg .pred p;",
    ".reg .b32 t, o, n;",
    "mov.u32 t, %tid.x;",
    "setp.ne.b32 p, t, 0;",
    "@p bra MET;",  # thread 0 alone; the CTA barriers around this order the other threads
    "atom.global.gpu.acq_rel.add.u32 o, [$1], $2;",  # release: this CTA's stores become visible with it. o: the value before
    "AGAIN: ld.acquire.gpu.global.b32 n, [$1];",  # acquire: the other CTAs' stores are visible after it
    "xor.b32 n, n, o;",  # bit 31 is set once it differs from the value before
    "setp.ge.s32 p, n, 0;",
    "@p bra AGAIN;",
    "MET: mov.u32 $0, t; }",
)

_PDL_WAIT_AND_LAUNCH_DEPENDENTS = ptx(
    "griddepcontrol.wait;",  # the previous kernel has finished, and its stores are visible
    "griddepcontrol.launch_dependents;",  # CTAs of the next kernel may take SM resources that are free
    "mov.b32 $0, $1;",
)
