"""Measures the fused layer kernel on one CUDA device, compared with its linears one by one, in CUDA graphs over rotating weights.

    PYTHONPATH=src python benchmarks/kernels/fused_layer.py [--forms bfloat16,fp8,bytes,int4,int4/32] [--rows 1,8,16] [--tiles]

Shapes of Llama-3.1-8B. Numbers of rows that no kernel supports are left out. The floor is the bytes of the weights ÷ 4.42 TB/s, the
measured read bandwidth of an H200. --tiles also measures other tiles (small batch) and other split-K counts (large batch).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.fused_layer import fused_layer as one_by_one
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.large_batch.launch import Plan, plan_for, plan_with_split_k
from stoker.kernels.triton.fused_layer.launch import fused_layer, supports_fused_layer
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.fused_layer.small_batch.launch import MAX_TOKENS
from stoker.kernels.triton.gemm.quantized.int4 import prepare_weight
from stoker.kernels.tuning.tiles import SmallBatchTile
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion
from stoker.profiling.tile_tuning import time_graph
from stoker.quant.linear_ops import PackedLinear

READ_TB_S = 4.42
LAYERS = 8
HIDDEN, SIZE, QKV = 4096, 14336, 6144


def linear(form: str, n: int, k: int, fusion: Fusion) -> FusedLinear:
    if form.startswith("int4"):
        group = int(form.partition("/")[2] or 128)
        values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scale = (torch.rand(n, k // group, device="cuda") * k**-0.5 / 4).half()
        weight = prepare_weight(PackedWeight("int4", values, scale, torch.full_like(scale, 8).byte(), group))
    elif form == "bfloat16":
        weight = PackedWeight("dense", (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16())
    else:
        values, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda"), torch.rand(n, device="cuda") * k**-0.5 / 64
        if form == "bytes":
            weight = PackedWeight("int8", values, scale)
        else:
            weight = PackedWeight("fp8", (values / 16).to(torch.float8_e4m3fn), scale, activations="token")
    return FusedLinear(PackedLinear(weight), weight, fusion)


def layer(form: str) -> FusedLayer:
    norm = Fusion("rms", torch.rand(HIDDEN, device="cuda").bfloat16(), None, 1e-5)
    return FusedLayer(
        linear(form, HIDDEN, HIDDEN, PLAIN),
        linear(form, 2 * SIZE, HIDDEN, replace(norm, gate="silu")),
        linear(form, HIDDEN, SIZE, PLAIN),
        linear(form, QKV, HIDDEN, norm),
    )


def num_bytes(parts: FusedLayer) -> int:
    tensors = [t for one in parts.linears if one.weight for t in (one.weight.values, one.weight.scale, one.weight.zero) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def tiles(form: str) -> list[SmallBatchTile]:
    found = [SmallBatchTile(8, 1, kib << 10, 168, MAX_TOKENS) for kib in (64, 96, 128, 160)] + [
        SmallBatchTile(8, 2, kib << 10, 168, MAX_TOKENS) for kib in (64, 96, 128, 160)
    ]
    return found + [SmallBatchTile(16, 1, kib << 10, 128, MAX_TOKENS) for kib in (96, 128)] if form != "fp8" else found


def measure(form: str, rows: int, try_tiles: bool) -> dict[str, Any]:
    layers = [layer(form) for _ in range(LAYERS)]
    x, stream = torch.randn(rows, HIDDEN, device="cuda").bfloat16(), torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    floor = num_bytes(layers[0]) / READ_TB_S / 1e6

    def time_layers(run: Any) -> float:
        def walk() -> Tensor:
            after = stream
            for parts in layers:
                after, _ = run(x, after, parts)
            return after

        return round(time_graph(walk, 25) / LAYERS, 2)

    is_small = not large_batch.supports_large_batch(layers[0], rows)
    result = {
        "form": form,
        "rows": rows,
        "floor_us": round(floor, 2),
        "alone_us": time_layers(one_by_one),
        "fused_us": time_layers(fused_layer),
    }
    print(" ".join(f"{name} {value:<8}" for name, value in result.items()), flush=True)
    others: list[Any] = [] if not try_tiles else tiles(form) if is_small else plans(layers[0], rows)
    for other in others:
        one = partial(small_batch.run_small_batch, tile=other) if is_small else partial(large_batch.run_large_batch, plan=other)
        print(f"   {other}  {time_layers(one):6.2f}", flush=True)
    return result


def plans(parts: FusedLayer, rows: int) -> list[Plan]:
    """The plan of the launcher, and plans in which one linear has another split-K count."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    first = plan_for(parts, rows, num_sms)
    assert first is not None
    found = [first]
    for index in range(4):
        for count in (1, 2, 4, 8, 16):
            split_k = list(first.split_k)
            split_k[index] = count
            other = plan_with_split_k(parts, first.num_tokens, tuple(split_k))
            if count != first.split_k[index] and other is not None:
                found.append(other)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="bfloat16,fp8,bytes,int4,int4/32")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [int(count) for count in args.rows.split(",")]
    results = [
        measure(form, count, args.tiles) for form in args.forms.split(",") for count in rows if supports_fused_layer(layer(form), count)
    ]
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "layers": LAYERS, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
