"""Measures the new tokens of decode rows over an e4m3 cache (`FP8_KV`): attention in one launch, and after a launch of `rope_store`.

    PYTHONPATH=src python benchmarks/kernels/new_tokens.py [--rows 1,2] [--keys 1000] [--json FILE]

32 query heads of 128 with 8 key heads (Llama-3.1-8B) and with 4 (one of two ranks of Llama-3.1-70B), in bfloat16, balanced, keys less a
mean. Times are per layer, medians of a captured graph of 80 layers with caches of their own, which together are larger than the L2 cache.
Both variants must store the same bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

import torch
from attention import BF16, BLOCK, FP8, HEADS, SIZE, graph_time, problem
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.kernels.types import AttentionParams, Rotary

LAYERS = 80
MAX_TOKENS = 8192  # of a row
# So that two rows are processed in one launch, too.
PARAMS = AttentionParams(SIZE**-0.5, before_fused_layer=True)


@dataclass
class Layer:
    """The inputs of one layer of a step."""

    qkv: Tensor  # [rows, HEADS + 2 × kv_heads, SIZE]
    rotary: Rotary
    cache: KVCache
    batch: ForwardBatch

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = self.cache.keys.shape[1]
        q, k, v = self.qkv.split((HEADS, kv_heads, kv_heads), 1)
        return q, k, v

    def in_one_launch(self) -> Tensor:
        return ops.rope_attention(*self.parts, self.rotary, self.cache, self.batch, PARAMS)

    def in_two_launches(self) -> Tensor:
        q = ops.rope_store(*self.parts, self.rotary, self.cache, self.batch.slots)
        return ops.attention(q, self.cache, self.batch, PARAMS)

    def copy(self) -> Layer:
        assert self.cache.values is not None
        cache = replace(self.cache, keys=self.cache.keys.clone(), values=self.cache.values.clone())
        return replace(self, qkv=self.qkv.clone(), cache=cache)


def layer(rows: int, keys: int, kv_heads: int) -> Layer:
    """`rows` rows of `keys` keys, of which the last ones are not in the cache yet."""
    made = problem([keys] * rows, [1] * rows, FP8, MAX_TOKENS, "cuda", kv_heads=kv_heads, has_mean=True)
    batch, last = made.batch, keys - 1
    batch.slots = batch.block_tables[:, last // BLOCK] * BLOCK + last % BLOCK
    batch.positions = torch.full((rows,), last, dtype=torch.int32, device="cuda")
    # Factors of one: queries that are transformed in place in every replay stay as large as they are.
    made.cache.key_balance = torch.ones(kv_heads, 2, SIZE, device="cuda")
    angles = torch.arange(MAX_TOKENS, device="cuda")[:, None] / 500_000 ** (torch.arange(0, SIZE, 2, device="cuda") / SIZE)
    rotary = Rotary(batch.positions, torch.cat((angles.cos(), angles.sin()), 1), False)
    qkv = torch.randn(rows, HEADS + 2 * kv_heads, SIZE, dtype=BF16, device="cuda")
    return Layer(qkv, rotary, made.cache, batch)


def stored_bytes(cache: KVCache) -> Tensor:
    assert cache.values is not None
    return torch.cat([pages.view(torch.int8).flatten() for pages in (cache.keys, cache.values)])


def difference(first: Layer) -> tuple[float, int]:
    """(‖one − two‖ / ‖two‖ of the outputs, bytes of the caches that differ)."""
    one, two = first.copy(), first.copy()
    out, expected = one.in_one_launch().double(), two.in_two_launches().double()
    error = float((out - expected).norm() / expected.norm())
    return error, int((stored_bytes(one.cache) != stored_bytes(two.cache)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2")
    parser.add_argument("--keys", default="1000")
    parser.add_argument("--json", help="write the results to this file")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for kv_heads in (8, 4):
        for rows in map(int, chosen.rows.split(",")):
            for keys in map(int, chosen.keys.split(",")):
                layers = [layer(rows, keys, kv_heads) for _ in range(LAYERS)]
                error, num_different = difference(layers[0])
                one, two = (
                    graph_time(launches) * 1e6 for launches in ([x.in_one_launch for x in layers], [x.in_two_launches for x in layers])
                )
                wrong = "" if error < 1e-2 and num_different == 0 else f"  WRONG: {num_different} bytes, error {error:.1e}"
                shape = f"{rows} x {keys} keys, {HEADS} / {kv_heads} heads"
                print(f"{shape:32} one launch {one:6.2f} us, two {two:6.2f} us per layer{wrong}", flush=True)
                results.append({"rows": rows, "keys": keys, "kv_heads": kv_heads, "one_us": one, "two_us": two, "error": error})
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({**provenance(device="cuda"), "layers": LAYERS, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
