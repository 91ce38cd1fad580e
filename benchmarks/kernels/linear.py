"""Tunes and times the linears of a model for few rows on this GPU, compared with float64 and with the GEMM of PyTorch.

PYTHONPATH=src python benchmarks/kernels/linear.py --model llama-3.1-8b --json linear.json
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch

from stoker.cli.benchmark.results import provenance
from stoker.kernels.reference import linear as reference
from stoker.kernels.triton.gemm.dense import launch as kernels
from stoker.profiling.tile_tuning import LinearCase, candidates, precompile, time_linear

READ_TB_S = 4.42  # measured read bandwidth of one H200

MODELS = {
    "llama-3.1-8b": {
        "qkv": (6144, 4096, "n"),
        "out": (4096, 4096, "r"),
        "up": (14336, 4096, "ng"),
        "down": (4096, 14336, "r"),
        "head": (128256, 4096, "n"),
    },
    "llama-3.2-1b": {
        "qkv": (3072, 2048, "n"),
        "out": (2048, 2048, "r"),
        "up": (8192, 2048, "ng"),
        "down": (2048, 8192, "r"),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS)
    parser.add_argument("--rows", default="1,16,32,64")
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = {
        (name, rows): LinearCase(rows, n, k, "g" in parts, "n" in parts, "r" in parts)
        for name, (n, k, parts) in MODELS[args.model].items()
        for rows in map(int, args.rows.split(","))
    }
    started = time.time()
    precompile(cases.values(), os.cpu_count() or 1)
    print(f"compiled in {time.time() - started:.0f} s", flush=True)
    results = []
    for (name, rows), case in cases.items():
        times = time_linear(case, [None, *candidates(case)])
        library = times.pop(None)
        best = sorted(times, key=lambda tile: times[tile])[:3]
        floor = case.n * case.k * 2 * (2 if case.gated else 1) / READ_TB_S / 1e6
        error = check(case, best[0])
        shape = {"linear": name, "rows": rows, "n": case.n, "k": case.k, "gated": case.gated}
        tiles = [{**vars_of(tile), "us": times[tile]} for tile in best]
        results.append({**shape, "library_us": library, "floor_us": floor, "error": error, "best": tiles})
        took = f"{times[best[0]]:6.1f} us ({floor / times[best[0]]:.0%})"
        print(f"{name:5} M={rows:<3} floor {floor:6.1f}  library {library:6.1f}  best {took}  {best[0]}  err {error:.1e}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1)


def vars_of(tile: object) -> dict[str, int]:
    return {name: getattr(tile, name) for name in ("block_n", "block_k", "splits", "num_warps", "num_stages", "fuse_norm")}


def check(case: LinearCase, tile: object) -> float:
    """Relative error of a tile for new random inputs, compared with float64."""
    x, weights, fusion = case.tensors("cuda", torch.bfloat16)
    weight = weights[0]
    got = kernels.small_linear(x, weight, None, fusion, tile).double()
    wide = type(fusion)(
        fusion.norm_kind,
        None if fusion.norm_weight is None else fusion.norm_weight.double(),
        None,
        fusion.norm_eps,
        fusion.gate,
        None if fusion.residual is None else fusion.residual.double(),
    )
    want = reference.around(x.double(), wide, lambda rows: torch.cat([rows @ part.double().T for part in weight.split(8192)], dim=-1))
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    main()
