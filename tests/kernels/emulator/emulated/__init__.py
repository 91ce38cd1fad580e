"""Runs the machine code of kernels (PTX) on a machine without a GPU, thread by thread, including Gluon and inline assembly.

A kernel is compiled as for a device. The emulation is harsher than a device: tensors have separate addresses, with gaps that must not be
accessed; shared memory and registers begin as NaN; copies and products of wgmma are done as late as waiting allows; after a barrier some
warps are late; CTAs run in a random order. Kernels of several ranks run together, in one memory that all of them can access. These faults
raise an AssertionError, most of them a `RaceError`:

    accesses without order   stores and loads of two threads that no barrier, and no release and acquire, orders (`ordering`)
    proxies                  bulk copies and wgmma that use what threads stored, without a `fence.proxy.async` on the path (`ordering`)
    dependent launches       accesses that conflict with the previous launch before `griddepcontrol.wait` (`stream`)
    asynchronous operations  registers of wgmma that change before its group is waited for; bulk copies that a CTA leaves pending

What remains invisible:

- Values are sequentially consistent. A missing order is found by the stamps of accesses, not by a stale value; a cached copy in L1 is not
  modelled.
- Loads of one place by several CTAs leave the stamp of the last one, so a later store is ordered after that one only. Loads by copies have
  no stamp: a store that overtakes one is found between launches, but not within a launch.
- Stores of the same value by several CTAs are not ordered, and a load of that value is not either.
- Strong loads (relaxed, volatile) may be concurrent with plain stores of whole words, which PTX calls a race, because attention's flags are
  such words.
- Lanes of a diverged warp run together, and `wgmma.fence`, scopes below the device, and fences between CTAs (`fence.acq_rel`, `membar`)
  are not modelled; the last raise NotImplementedError.
- In warp-specialized kernels (`warps`), the order of accesses to shared memory: it follows from mbarriers and barriers of some warps, which
  have no stamps. A missing wait gives a wrong result only if the random order of warps makes it one. Accesses to global memory have stamps,
  in which a barrier of some warps counts as one of all.
- An order of CTAs or warps that the seed does not produce; the time that anything takes; whether all CTAs of a launch are resident.
"""
