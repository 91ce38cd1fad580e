"""Compile representative launches for one compute capability, the argument. Runs as a process of its own.

Prints the shared memory and the special instructions of each launch as JSON.
"""

from __future__ import annotations

import json
import sys

from compile_all import LAUNCHES

from stoker.kernels.triton.aot.offline_target import compiling

REPRESENTATIVE = (
    "norm", "gated silu", "embedding", "rope decode", "linear, 1 rows", "linear, 32 rows, gated", "decode 64", "prefill 128 tokens",
    "quant fp8, 32 rows", "quant int8, 32 rows", "quant w8a8, 32 rows", "quant int4, 32 rows", "skinny int8, 8 rows",
    "skinny int4, 8 rows", "quant int4 in groups of 32, 64 rows", "experts torch.int8, 64 rows",
    "experts int4 in groups of 32, float, 64 rows", "experts int4 in groups of 32, e2m1, 64 rows", "experts torch.bfloat16, 64 rows",
    "route",
)  # fmt: skip


def main(capability: int) -> None:
    for name in REPRESENTATIVE:
        try:
            with compiling(capability) as kernels:
                LAUNCHES[name]()
        except Exception as problem:
            print(json.dumps({"launch": name, "problem": f"{type(problem).__name__}: {problem}"[:300]}), flush=True)
            continue
        shared = [kernel.metadata.shared for kernel in kernels]
        ptx = "".join(kernel.asm["ptx"] for kernel in kernels)
        used = [word for word in ("wgmma", "griddepcontrol", "tcgen05") if word in ptx]
        print(json.dumps({"launch": name, "shared_bytes": shared, "instructions": used}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
