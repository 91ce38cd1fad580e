"""Measures norm, activation, embedding and rope + cache write on one CUDA device, compared with float64 and with the copy bandwidth.

    PYTHONPATH=src python benchmarks/kernels/pointwise.py

Shapes of Llama-3.1-8B in bfloat16 for 1, 64, 256 and 8,192 tokens. Times are medians of CUDA graph replays over rotating buffers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention import graph_time
from torch import Tensor

from stoker.core.forward_batch import KVCache
from stoker.kernels.reference import activation as activation_ref
from stoker.kernels.reference import norm as norm_ref
from stoker.kernels.reference import rope as rope_ref
from stoker.kernels.triton import activation, embedding, norm, rope

COPY_CEILING = 4.28e12  # bytes/s, read + write
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, BLOCK, EPS = 4096, 14336, 32, 8, 128, 64, 1e-5
ROTATED_BYTES = 256 << 20


@dataclass
class Launch:
    """One launch: how to run it, the bytes it must move, and its error compared with float64."""

    run: Callable[[], object]
    num_bytes: int
    error: Callable[[], float]


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


def gathered(tokens: int) -> Launch:
    table, ids = values(32_000, HIDDEN), torch.randint(0, 32_000, (tokens,), dtype=torch.int32, device="cuda")
    return Launch(
        lambda: embedding.embedding(ids, table),
        2 * tokens * HIDDEN * 2,
        lambda: difference(embedding.embedding(ids, table), table[ids.long()]),
    )


def rotated(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    fused = values(tokens, (HEADS + 2 * KV_HEADS) * SIZE)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in fused.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], 1))
    scale = None if dtype == torch.bfloat16 else torch.rand(KV_HEADS, device="cuda") + 0.1
    pages = (-(-tokens // BLOCK) + 1, KV_HEADS, BLOCK, SIZE)
    cache = KVCache(*(torch.zeros(pages, device="cuda").to(dtype) for _ in range(2)), scale, scale)
    slots = torch.randperm(pages[0] * BLOCK, device="cuda")[:tokens].int()
    positions = torch.randint(0, 8192, (tokens,), dtype=torch.int32, device="cuda")
    angles = torch.arange(8192, device="cuda")[:, None] / 500_000 ** (torch.arange(0, SIZE, 2, device="cuda") / SIZE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)

    def error() -> float:
        before = fused.cpu()
        parts = (p.unflatten(1, (-1, SIZE)) for p in before.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], 1))
        on_cpu = None if scale is None else scale.cpu()
        expected = KVCache(torch.zeros_like(cache.keys, device="cpu"), torch.zeros_like(cache.values, device="cpu"), on_cpu, on_cpu)
        turned = rope_ref.rope_store(*parts, positions.cpu(), cos_sin.cpu(), False, expected, slots.cpu())
        rope.rope_store(q, k, v, positions, cos_sin, False, cache, slots)
        found = [difference(q, turned)]
        found += [difference(a.float(), b.float()) for a, b in ((cache.keys, expected.keys), (cache.values, expected.values))]
        fused.copy_(before)
        return max(found)

    moved = 2 * q.numel() * 2 + 2 * k.numel() * (2 + dtype.itemsize)
    return Launch(lambda: rope.rope_store(q, k, v, positions, cos_sin, False, cache, slots), moved, error)


KERNELS: dict[str, Callable[[int], Launch]] = {
    "rms norm 4096": rms_norm,
    "gated silu 14336": gated,
    "embedding 4096": gathered,
    "rope + store": rotated,
    "rope + store fp8": lambda tokens: rotated(tokens, torch.float8_e4m3fn),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    for name, make in KERNELS.items():
        for tokens in (1, 64, 256, 8192):
            first = make(tokens)
            error = first.error()
            copies = 1 if name.startswith("embedding") else min(16, max(1, ROTATED_BYTES // first.num_bytes))
            seconds = graph_time([first.run, *(make(tokens).run for _ in range(copies - 1))])
            rate = first.num_bytes / seconds
            speed = f"{seconds * 1e6:8.2f} us {rate / 1e12:5.2f} TB/s {rate / COPY_CEILING:6.1%}"
            print(f"{name:18} {tokens:5} tokens {speed}  error {error:.1e}{'' if error < 5e-3 else '  WRONG'}", flush=True)


if __name__ == "__main__":
    main()
