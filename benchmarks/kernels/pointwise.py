"""Measures norm, activation, embedding, rope + cache write, quantization of rows and greedy sampling on one CUDA device.

    PYTHONPATH=src python benchmarks/kernels/pointwise.py [--only quantize] [--tokens 1,64,256] [--json FILE]

Shapes of Llama-3.1-8B in bfloat16 for 1 to 8,192 tokens, and of Llama-3.1-70B where named. Results are compared with float64
and with the copy bandwidth. Times are medians of CUDA graph replays over rotating buffers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention import graph_time
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.forward_batch import KVCache
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import activation as activation_ref
from stoker.kernels.reference import norm as norm_ref
from stoker.kernels.reference import rope as rope_ref
from stoker.kernels.triton import activation, embedding, norm, rope, sampling
from stoker.kernels.triton.gemm.quantized import int8
from stoker.kernels.triton.gemm.quantized.activations import QuantizedActivations, quantize_rows
from stoker.kernels.types import MEAN_TOKENS, DrawParams, HeadNorms, Rotary

COPY_CEILING = 4.28e12  # bytes/s, read + write
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, BLOCK, EPS = 4096, 14336, 32, 8, 128, 64, 1e-5
ROTATED_BYTES = 256 << 20


@dataclass
class Launch:
    """One launch: how to run it, the bytes it must move, and its error compared with float64."""

    run: Callable[[], object]
    num_bytes: int
    error: Callable[[], float]
    bound: float = 5e-3  # of the error


def values(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def difference(out: Tensor, expected: Tensor) -> float:
    return float((out.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm())


def rms_norm(tokens: int) -> Launch:
    x, weight = values(tokens, HIDDEN), values(HIDDEN)

    def error() -> float:
        return difference(norm.norm(x, weight, None, EPS, "rms"), norm_ref.norm(x.double(), weight, None, EPS, "rms"))

    return Launch(lambda: norm.norm(x, weight, None, EPS, "rms"), 2 * x.numel() * 2, error)


def gated(tokens: int) -> Launch:
    x = values(tokens, 2 * INTERMEDIATE)
    return Launch(
        lambda: activation.gated(x, "silu"),
        3 * tokens * INTERMEDIATE * 2,
        lambda: difference(activation.gated(x, "silu"), activation_ref.gated(x.double(), "silu")),
    )


def quantized(tokens: int, width: int, kind: str) -> Launch:
    """Rows of `width` features to e4m3, whose error is 0.026. kind: "plain", "norm" before, or "gate": the product of two halves."""
    x = values(tokens, width * (2 if kind == "gate" else 1))
    weight, gate = values(width) if kind == "norm" else None, "silu" if kind == "gate" else None

    def run() -> QuantizedActivations:
        return quantize_rows(x, "fp8", width, norm_weight=weight, eps=EPS, gate=gate)

    def error() -> float:
        result = run()
        real = activation_ref.gated(x.double(), "silu") if gate else x.double()
        if weight is not None:
            real = norm_ref.norm(real, weight.double(), None, EPS, "rms")
        return difference(result.values.double() * result.scale.double()[:, None], real)

    return Launch(run, 2 * x.numel() + tokens * width, error, 0.03)


def gathered(tokens: int) -> Launch:
    table, ids = values(32_000, HIDDEN), torch.randint(0, 32_000, (tokens,), dtype=torch.int32, device="cuda")
    return Launch(
        lambda: embedding.embedding(ids, table),
        2 * tokens * HIDDEN * 2,
        lambda: difference(embedding.embedding(ids, table), table[ids.long()]),
    )


def greedy(tokens: int, vocab: int) -> Launch:
    """The tokens of the largest logits. The error is the part of rows whose token is another one."""
    logits = values(tokens, vocab)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    params = DrawParams(**{name: torch.zeros(tokens, device="cuda") for name in names}, all_greedy=True)

    def error() -> float:
        chosen = sampling.sample(logits, params).long()[:, None]
        return float((logits.gather(1, chosen)[:, 0] != logits.max(1).values).float().mean())

    return Launch(lambda: sampling.sample(logits, params), logits.numel() * 2, error)


def dequantized(tokens: int) -> Launch:
    """As many rows of an int8 weight as there are tokens, in bfloat16."""
    weight = torch.randint(-127, 128, (tokens, HIDDEN), dtype=torch.int8, device="cuda")
    scale = torch.rand(tokens, device="cuda")
    packed = PackedWeight("int8", weight, scale)

    def run() -> Tensor:
        return int8.dequantize_int8(packed, 0, tokens, torch.bfloat16)

    return Launch(run, 3 * tokens * HIDDEN, lambda: difference(run(), weight.double() * scale.double()[:, None]))


def rotated(
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    is_spread: bool = False,
    is_normed: bool = False,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> Launch:
    """Rotation and cache write.

    is_spread: heads are balanced and transformed, and keys are stored less means, as with `FP8_KV`. is_normed: queries and keys are
    normalized before, as in Qwen3.
    """
    widths = [heads * SIZE, kv_heads * SIZE, kv_heads * SIZE]
    fused = values(tokens, sum(widths))
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in fused.split(widths, 1))
    scale = None if dtype == torch.bfloat16 else torch.rand(kv_heads, device="cuda") + 0.1
    pages = (-(-tokens // BLOCK) + 1, kv_heads, BLOCK, SIZE)
    cache = KVCache(*(torch.zeros(pages, device="cuda").to(dtype) for _ in range(2)), scale, scale)
    if is_spread:
        cache.key_balance = torch.rand(kv_heads, 2, SIZE, device="cuda") + 0.5
        cache.key_mean = torch.randn(kv_heads, 8192 // MEAN_TOKENS, SIZE, device="cuda")
    slots = torch.randperm(pages[0] * BLOCK, device="cuda")[:tokens].int()
    positions = torch.randint(0, 8192, (tokens,), dtype=torch.int32, device="cuda")
    angles = torch.arange(8192, device="cuda")[:, None] / 500_000 ** (torch.arange(0, SIZE, 2, device="cuda") / SIZE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norms = HeadNorms(*(torch.rand(SIZE, device="cuda").bfloat16() + 0.5 for _ in range(2)), 1e-6) if is_normed else None
    rotary = Rotary(positions, cos_sin, False, norms)

    def error() -> float:
        before = fused.cpu()
        parts = (p.unflatten(1, (-1, SIZE)) for p in before.split(widths, 1))
        zeros = (torch.zeros_like(cache.keys, device="cpu"), torch.zeros_like(cache.values, device="cpu"))
        others = (cache.key_scale, cache.value_scale, cache.key_balance, cache.key_mean)
        expected = KVCache(*zeros, *(None if t is None else t.cpu() for t in others))
        cpu_norms = None if norms is None else HeadNorms(norms.q_weight.cpu(), norms.k_weight.cpu(), norms.eps)
        turned = rope_ref.rope_store(*parts, Rotary(positions.cpu(), cos_sin.cpu(), False, cpu_norms), expected, slots.cpu())
        rope.rope_store(q, k, v, rotary, cache, slots)
        found = [difference(q, turned)]
        found += [difference(a.float(), b.float()) for a, b in ((cache.keys, expected.keys), (cache.values, expected.values))]
        fused.copy_(before)
        return max(found)

    moved = 2 * q.numel() * 2 + 2 * k.numel() * (2 + dtype.itemsize)
    return Launch(lambda: rope.rope_store(q, k, v, rotary, cache, slots), moved, error, 2e-2 if is_spread else 5e-3)


KERNELS: dict[str, Callable[[int], Launch]] = {
    "rms norm 4096": rms_norm,
    "gated silu 14336": gated,
    "embedding 4096": gathered,
    "rope + store": rotated,
    "rope + store, normed": lambda tokens: rotated(tokens, is_normed=True),
    "rope + store fp8, spread, normed": lambda tokens: rotated(tokens, torch.float8_e4m3fn, True, True),
    "rope + store fp8": lambda tokens: rotated(tokens, torch.float8_e4m3fn),
    "rope + store fp8, spread": lambda tokens: rotated(tokens, torch.float8_e4m3fn, True),
    "rope + store fp8, spread, 32 / 4 heads": lambda tokens: rotated(tokens, torch.float8_e4m3fn, True, kv_heads=4),
    "rope + store fp8, spread, 16 / 4 heads": lambda tokens: rotated(tokens, torch.float8_e4m3fn, True, heads=16, kv_heads=4),
    "greedy 128256": lambda tokens: greedy(tokens, 128256),
    "greedy 201088": lambda tokens: greedy(tokens, 201088),
    "dequantize int8 4096": dequantized,
    "quantize 4096": lambda tokens: quantized(tokens, 4096, "plain"),
    "quantize norm 4096": lambda tokens: quantized(tokens, 4096, "norm"),
    "quantize norm 8192 (70B)": lambda tokens: quantized(tokens, 8192, "norm"),
    "quantize gate 7168": lambda tokens: quantized(tokens, 7168, "gate"),
    "quantize gate 14336": lambda tokens: quantized(tokens, INTERMEDIATE, "gate"),
    "quantize gate 28672 (70B)": lambda tokens: quantized(tokens, 28672, "gate"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the beginning of the names of kernels to measure")
    parser.add_argument("--tokens", default="1,64,256,768,2048,8192")
    parser.add_argument("--json", help="write the results to this file")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for name, make in KERNELS.items():
        if not name.startswith(chosen.only):
            continue
        for tokens in map(int, chosen.tokens.split(",")):
            first = make(tokens)
            error = first.error()
            copies = 1 if name.startswith("embedding") else min(16, max(1, ROTATED_BYTES // first.num_bytes))
            seconds = graph_time([first.run, *(make(tokens).run for _ in range(copies - 1))])
            rate = first.num_bytes / seconds
            speed = f"{seconds * 1e6:8.2f} us {rate / 1e12:5.2f} TB/s {rate / COPY_CEILING:6.1%}"
            print(f"{name:32} {tokens:5} tokens {speed}  error {error:.1e}{'' if error < first.bound else '  WRONG'}", flush=True)
            results.append({"kernel": name, "tokens": tokens, "us": seconds * 1e6, "floor_us": first.num_bytes / COPY_CEILING * 1e6})
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
