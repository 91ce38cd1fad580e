"""Measures the fused layer kernel on one CUDA device, compared with its linears one by one, in CUDA graphs over rotating weights.

    PYTHONPATH=src python benchmarks/kernels/fused_layer.py [--forms bfloat16,fp8,bytes,int4,int4/32] [--rows 1,8,16] [--tiles]
    PYTHONPATH=src python benchmarks/kernels/fused_layer.py --ranks 2 --forms fp8 --rows 1,2,4

Shapes of Llama-3.1-8B; with several tensor-parallel ranks, each on a GPU, those of Llama-3.1-70B, and the time of the slowest rank. Numbers
of rows that no kernel supports are left out. The floor is the bytes of the weights ÷ 4.42 TB/s, the measured read bandwidth of an H200.
--tiles also measures other tiles (small batch) and other split-K counts (large batch).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from stoker.base.config import Mapping
from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.distributed.world import join
from stoker.kernels.reference.fused_layer import fused_layer as one_by_one
from stoker.kernels.triton.all_reduce import check_inboxes
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.large_batch.launch import Plan, plan_for, plan_with_split_k
from stoker.kernels.triton.fused_layer.launch import fused_layer, supports_fused_layer
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.fused_layer.small_batch.launch import MAX_TOKENS
from stoker.kernels.triton.gemm.quantized.int4 import prepare_weight
from stoker.kernels.tuning.tiles import SmallBatchTile
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion
from stoker.layers.linear import linear_all_reduce
from stoker.profiling.tile_tuning import time_graph
from stoker.quant.linear_ops import PackedLinear

READ_TB_S = 4.42
LAYERS = 8
# Features of the heads, of the residual stream, of the MLP, and of q, k and v.
LLAMA_8B, LLAMA_70B = (4096, 4096, 14336, 6144), (8192, 8192, 28672, 10240)


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


def layer(form: str, group: Group = SINGLE) -> FusedLayer:
    """The layer of one rank of `group`."""
    sizes, split = LLAMA_8B if group.size == 1 else LLAMA_70B, group.size
    hidden, (heads, _, size, qkv) = sizes[1], (features // split for features in sizes)
    norm = Fusion("rms", torch.rand(hidden, device="cuda").bfloat16(), None, 1e-5)
    out, down = linear(form, hidden, heads, PLAIN), linear(form, hidden, size, PLAIN)
    if split > 1:
        out, down = summed(out, group), summed(down, group)
    return FusedLayer(out, linear(form, 2 * size, hidden, replace(norm, gate="silu")), down, linear(form, qkv, hidden, norm), group)


def summed(one: FusedLinear, group: Group) -> FusedLinear:
    """The linear with an all-reduce, which adds the residual."""

    def alone(x: Tensor, fusion: Fusion) -> Tensor:
        return linear_all_reduce(PackedLinear(one.weight), x, group, fusion.residual)  # type: ignore[arg-type]

    return replace(one, alone=alone)


def num_bytes(parts: FusedLayer) -> int:
    tensors = [t for one in parts.linears if one.weight for t in (one.weight.values, one.weight.scale, one.weight.zero) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def tiles(form: str) -> list[SmallBatchTile]:
    found = [SmallBatchTile(8, 1, kib << 10, 168, MAX_TOKENS) for kib in (64, 96, 128, 160)] + [
        SmallBatchTile(8, 2, kib << 10, 168, MAX_TOKENS) for kib in (64, 96, 128, 160)
    ]
    return found + [SmallBatchTile(16, 1, kib << 10, 128, MAX_TOKENS) for kib in (96, 128)] if form != "fp8" else found


def measure(form: str, rows: int, try_tiles: bool, group: Group = SINGLE) -> dict[str, Any]:
    layers = [layer(form, group) for _ in range(LAYERS)]
    features, hidden = layers[0].out.weight.in_features, layers[0].out.outputs  # type: ignore[union-attr]
    x, stream = torch.randn(rows, features, device="cuda").bfloat16(), torch.randn(rows, hidden, device="cuda").bfloat16()
    floor = num_bytes(layers[0]) / READ_TB_S / 1e6

    def time_layers(run: Any) -> float:
        def walk() -> Tensor:
            after = stream
            for parts in layers:
                after, _ = run(x, after, parts)
            return after

        return -group.smallest(-round(100 * time_graph(walk, 25) / LAYERS)) / 100

    is_small = not large_batch.supports_large_batch(layers[0], rows)
    result = {
        "form": form,
        "rows": rows,
        "ranks": group.size,
        "floor_us": round(floor, 2),
        "alone_us": time_layers(one_by_one),
        "fused_us": time_layers(fused_layer),
    }
    if group.rank == 0:
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


def measure_all(args: argparse.Namespace, group: Group = SINGLE) -> None:
    torch.manual_seed(0)
    rows = [int(count) for count in args.rows.split(",")]
    results = [
        measure(form, count, args.tiles, group)
        for form in args.forms.split(",")
        for count in rows
        if supports_fused_layer(layer(form, group), count)
    ]
    if args.json and group.rank == 0:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "layers": LAYERS, "results": results}, file, indent=1)


def rank_main(rank: int, port: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = join(store, rank, Mapping(tensor_parallel=args.ranks), device)
    with torch.inference_mode():
        check_inboxes(world.tensor)
        measure_all(args, world.tensor)
    world.everyone.smallest(0)
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="bfloat16,fp8,bytes,int4,int4/32")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, each on a GPU")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.ranks == 1:
        measure_all(args)
        return
    if args.tiles:
        parser.error("--tiles measures one rank: leave out --ranks")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, (store.port, args), args.ranks)


if __name__ == "__main__":
    main()
