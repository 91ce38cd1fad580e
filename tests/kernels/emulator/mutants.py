"""Faults in the PTX of kernels that the emulated device must detect. Run as a process of its own, uninterpreted:

    mutants.py CASE     runs a case of `mutant_cases`, then each of its mutants, and prints {mutant: how it was detected, "" if it was not}

A fault is detected by a wrong result, a bank conflict, counters that are not left at zero, or an AssertionError of the emulator.
"""

from __future__ import annotations

import json
import re
import sys
from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: `pattern` (a regular expression) in the PTX of `kernel` is replaced, everywhere or only its match number `nth`."""

    case: str
    kernel: str
    pattern: str
    replacement: str
    nth: int | None = None


_LARGE = ("large batch", "fused_layer_large_batch_kernel")
_SMALL = ("small batch", "fused_layer_small_batch_kernel")
_ATTENTION = ("attention", "decode_attention_kernel")
_SPLIT_K = ("split-K", "large_gemm_kernel")
_SKINNY = ("skinny", "skinny_gemm_kernel")

MUTANTS = {
    "no proxy fence between the grid barrier and the bulk copies": Mutant(*_LARGE, r"@p fence\.proxy\.async\.global;", ""),
    "no proxy fence between the stored operand and wgmma": Mutant(*_LARGE, r"fence\.proxy\.async\.shared::cta;", ""),
    "a wait for the wrong phase of an mbarrier": Mutant(*_LARGE, r"(mbarrier\.try_wait\.parity\S* p, \[[^]]*\]), 0;", r"\1, 1;"),
    "registers of wgmma overwritten one group too early": Mutant(*_LARGE, r"wgmma\.wait_group\.sync\.aligned 1;", ""),
    "partial sums that are not reset": Mutant(*_LARGE, r"(@[pq] )?st\.relaxed\S* \[[^]]*\], \{z, z, z, z\};", ""),
    "a grid barrier that does not release": Mutant(*_SMALL, r"atom\.global\.gpu\.acq_rel\.add", "atom.global.gpu.acquire.add"),
    "a grid barrier that does not acquire": Mutant(
        *_SMALL,
        r"atom\.global\.gpu\.acq_rel(\.add.*\n)AGAIN: ld\.acquire",
        r"atom.global.gpu.release\1AGAIN: ld.relaxed",
    ),
    "no CTA barrier before the atomic of a grid barrier": Mutant(
        *_SMALL, r"bar\.sync\s+0;((?:(?!bar\.sync)[^\0])*atom\.global\.gpu\.acq_rel)", r"\1", 0
    ),
    "a stage loaded one copy group too early": Mutant(*_SMALL, r"cp\.async\.wait_group 2;", "cp.async.wait_group 3;"),
    "scales of a stage refilled before all lanes have loaded them": Mutant(*_SMALL, r"bar\.warp\.sync 0xffffffff;", "", 2),
    "the zeros of other rows": Mutant(*_SMALL, r"ld\.shared\.b16 w, \[(%r\d+)\];", r"ld.shared.b16 w, [\1 + 2];", 0),
    "a fused layer that does not wait for its predecessor": Mutant(*_SMALL, r"griddepcontrol\.wait;", ""),
    "attention that does not wait for its predecessor": Mutant(*_ATTENTION, r"griddepcontrol\.wait;", ""),
    "no barrier between the stored new key and its load": Mutant(
        *_ATTENTION, r"(st\.global\.b16(?:(?!bar\.sync)[^\0])*)bar\.sync\s+0;", r"\1", 0
    ),
    "splits counted without a release": Mutant(*_ATTENTION, r"atom\.global\.gpu\.acq_rel\.add", "atom.global.gpu.acquire.add"),
    "slices counted without a release": Mutant(*_SPLIT_K, r"atom\.global\.gpu\.acq_rel\.add", "atom.global.gpu.acquire.add"),
    "slices combined without an acquire": Mutant(*_SPLIT_K, r"atom\.global\.gpu\.acq_rel\.add", "atom.global.gpu.release.add"),
    "no barrier before slices are counted": Mutant(*_SPLIT_K, r"bar\.sync\s+\d+, 128;((?:(?!bar\.sync)[^\0])*atom\.global)", r"\1"),
    "a counter of slices that is not reset": Mutant(*_SPLIT_K, r"@%p\d+ st\.global\.b32 \[ %rd\d+ \+ 0 \], \{ %r\d+ \};", ""),
    "a GEMM that does not wait for its activations": Mutant(*_SPLIT_K, r"griddepcontrol\.wait;", ""),
    "outputs staged before the last store has read its buffer": Mutant(*_SPLIT_K, r"cp\.async\.bulk\.wait_group\.read\s+1;", ""),
    "a skinny GEMM that does not wait for its activations": Mutant(*_SKINNY, r"griddepcontrol\.wait;", ""),
    "the scales of other rows": Mutant(*_SKINNY, r"(@%p\d+ ld\.global\.b32 \{ %r\d+ \}, \[ %rd\d+) \+ 0", r"\1 + 4", 0),
}
CASES = sorted({mutant.case for mutant in MUTANTS.values()})


def mutate(ptx: str, mutant: Mutant) -> str:
    """Raises LookupError where the pattern is not found."""
    matches = list(re.finditer(mutant.pattern, ptx))
    matches = matches if mutant.nth is None else matches[mutant.nth : mutant.nth + 1]
    if not matches:
        raise LookupError(f"{mutant.pattern} is not in the PTX of {mutant.kernel}")
    for match in reversed(matches):
        ptx = ptx[: match.start()] + match.expand(mutant.replacement) + ptx[match.end() :]
    return ptx


def main(case: str) -> None:
    """Run a case unchanged, then with each of its mutants."""
    from mutant_cases import run

    run(case, lambda kernel, ptx: ptx)
    detected = {}
    for name, mutant in MUTANTS.items():
        if mutant.case == case:
            try:
                run(case, lambda kernel, ptx, mutant=mutant: mutate(ptx, mutant) if kernel == mutant.kernel else ptx)  # type: ignore[misc]
            except AssertionError as error:
                detected[name] = f"{type(error).__name__}: {error}"[:200]
            else:
                detected[name] = ""
    print(json.dumps(detected))


if __name__ == "__main__":
    main(sys.argv[1])
