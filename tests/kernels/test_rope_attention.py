"""`rope_attention`, which rotates, stores and attends in one launch, in the interpreter against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import TOLERANCE, Case, expected_attention, relative_error
from test_rope import POSITIONS, expected_norm, expected_rotation, read_slots, table
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention.tiles import AttentionTile, Splits
from stoker.kernels.types import AttentionParams, HeadNorms, Rotary

ROWS = [(1, 37), (1, 1), (1, 130), (1, 64), (1, 65), (1, 17)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "half of 64": (Case(ROWS), 64, False),
    "half of 128": (Case(ROWS, size=128, dtype=BF16), 128, False),
    "interleaved": (Case(ROWS, size=128, dtype=BF16), 128, True),
    "part of a head": (Case(ROWS, size=80, dtype=FP16), 32, False),
    "part of a head, interleaved": (Case(ROWS, size=96, dtype=FP16), 24, True),
    "halves that are no power of two": (Case(ROWS, size=96, dtype=BF16), 96, False),
    "halves of odd width": (Case(ROWS, size=40), 10, False),
    "no rotation": (Case(ROWS, alibi=True), 0, False),
    "values of another size": (Case(ROWS, size=192, value_size=128, dtype=BF16), 64, False),
    "one KV head": (Case(ROWS, heads=5, kv_heads=1), 64, False),
    "more heads than a tile holds": (Case(ROWS, heads=80, kv_heads=2, size=32, dtype=BF16), 32, False),
    "block 64": (Case(ROWS, block_size=64, dtype=BF16), 64, False),
    "window": (Case(ROWS, window=20, dtype=BF16), 64, False),
    "window of one": (Case(ROWS, window=1), 64, False),
    "chunk": (Case(ROWS, chunk=32, dtype=BF16), 64, False),
    "soft cap": (Case(ROWS, softcap=5.0), 64, False),
    "sinks": (Case(ROWS, sinks=True), 64, False),
    "prefix": (Case(ROWS, prefix_lens=[10, 1, 130, 0, 65, 3]), 64, False),
    "everything": (Case(ROWS, softcap=9.0, sinks=True, window=33, alibi=True, size=80, dtype=BF16, block_size=32), 16, False),
}


def new_tokens(case: Case, dim: int, interleaved: bool) -> tuple[Any, ...]:
    """The arguments of `rope_attention` for decode rows whose last keys and values are not in the cache yet: its slots hold NaN."""
    q, cache, batch, params = case.build()
    assert cache.values is not None
    places = batch.seq_lens.long() - 1
    blocks = torch.stack([batch.block_tables[row, at // case.block_size] for row, at in enumerate(places)])
    batch.slots = (blocks * case.block_size + places % case.block_size).int()
    batch.positions = torch.randint(0, POSITIONS, places.shape, dtype=torch.int32)
    if case.alibi:
        params = replace(params, alibi_slopes=torch.rand(case.heads))
    for pages in (cache.keys, cache.values):
        for slot in batch.slots.tolist():
            pages[slot // case.block_size, :, slot % case.block_size] = float("nan")
    fused = torch.full((len(case.rows), case.kv_heads, case.size + (case.value_size or case.size) + 24), float("nan"), dtype=case.dtype)
    k, v = fused[..., 8 : 8 + case.size], fused[..., 16 + case.size : -8]
    for x in (k, v):
        x[:] = torch.randn(x.shape).to(case.dtype)
    rotary = Rotary(batch.positions, table(dim) if dim else None, interleaved)
    return q, k, v, rotary, cache, batch, params


def expected(
    q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams
) -> tuple[Tensor, KVCache]:
    """The result of attention, and the cache after the write."""
    assert cache.values is not None
    if rotary.norms is not None:
        q, k = (expected_norm(x, weight, rotary.norms.eps) for x, weight in ((q, rotary.norms.q_weight), (k, rotary.norms.k_weight)))
    if rotary.cos_sin is not None:
        q, k = (expected_rotation(x, rotary.positions, rotary.cos_sin, rotary.interleaved).to(q.dtype) for x in (q, k))
    after = KVCache(cache.keys.clone(), cache.values.clone())
    for pages, new in ((after.keys, k), (after.values, v)):
        assert pages is not None
        for row, slot in enumerate(batch.slots.tolist()):
            pages[slot // cache.block_size, :, slot % cache.block_size] = new[row].to(pages.dtype)
    return expected_attention(q, after, batch, params), after


def check(
    case: Case, dim: int, interleaved: bool, tile: AttentionTile | None = None, splits: Splits | None = None, split_tokens: int = 32,
    norms: HeadNorms | None = None,
) -> None:  # fmt: skip
    q, k, v, rotary, cache, batch, params = new_tokens(case, dim, interleaved)
    rotary = rotary._replace(norms=norms)
    batch.split_tokens = torch.tensor([split_tokens], dtype=torch.int32)  # which `splits` may select
    expected_out, after = expected(q, k, v, rotary, cache, batch, params)
    if tile is None:
        result = kernels.rope_attention(q, k, v, rotary, cache, batch, params)
    else:
        out = kernels._empty_output(q, cache)
        kernels.decode(q, cache, batch, params, out, tile, splits, kernels.StepTokens(k, v, rotary))
        result = out.flatten(1)
    assert relative_error(result, expected_out) < TOLERANCE[case.dtype]
    for pages, stored in ((cache.keys, after.keys), (cache.values, after.values)):
        assert relative_error(read_slots(pages, batch.slots), read_slots(stored, batch.slots)) < TOLERANCE[case.dtype]
        for slot in batch.slots.tolist():
            pages[slot // case.block_size, :, slot % case.block_size] = stored[slot // case.block_size, :, slot % case.block_size]
        assert torch.equal(pages.nan_to_num(99.0), stored.nan_to_num(99.0))  # nothing else was written
    assert not kernels._finished_counters(q.device).any() and not kernels._flag_words(q.device).any()


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    check(*CASES[name])


def norms(size: int, dtype: torch.dtype | None = BF16) -> HeadNorms:
    """Norms with random weights of the dtype, or without weights."""
    return HeadNorms(*(None if dtype is None else (torch.rand(size) * 3 - 1).to(dtype) for _ in range(2)), 1e-5)


@pytest.mark.parametrize("weight_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("name", CASES)
def test_with_norms_equals_float64(name: str, weight_dtype: torch.dtype | None) -> None:
    check(*CASES[name], norms=norms(CASES[name][0].size, weight_dtype))


@pytest.mark.parametrize(
    "splits", [Splits(1), Splits(2), Splits(3), Splits(8, 2), Splits(16), Splits(2, by_lengths=True), Splits(16, by_lengths=True)]
)
@pytest.mark.parametrize("block_n", [16, 64])
def test_results_do_not_depend_on_the_splits(block_n: int, splits: Splits) -> None:
    check(Case([(1, 90), (1, 1), (1, 40), (1, 33)], sinks=True, block_size=32), 64, False, AttentionTile(16, block_n, 4, 2), splits)


@pytest.mark.parametrize("seed", range(8))
def test_random_combinations(seed: int) -> None:
    pick = random.Random(seed)
    kv_heads, size = pick.choice((1, 2)), pick.choice((32, 64, 72, 80, 128))
    case = Case(
        [(1, pick.randint(1, 90)) for _ in range(pick.randint(1, 4))],
        heads=kv_heads * pick.choice((1, 2, 3, 5)), kv_heads=kv_heads, size=size, block_size=pick.choice((16, 32, 64)),
        dtype=pick.choice((BF16, FP16, FP32)), window=pick.choice((None, None, 7, 33)), softcap=pick.choice((None, 10.0)),
        alibi=pick.random() < 0.3, sinks=pick.random() < 0.3,
    )  # fmt: skip
    check(case, pick.choice((size, size // 2, 8)), pick.random() < 0.5, norms=norms(size) if seed % 2 else None)


@pytest.mark.parametrize("normed", [False, True])
def test_padding_rows_store_nothing_and_give_zeros(normed: bool) -> None:
    q, k, v, rotary, cache, batch, params = new_tokens(Case([(1, 37), (1, 5)]), 64, False)
    rotary = rotary._replace(norms=norms(64) if normed else None)
    want = [pages.clone() for pages in (cache.keys, cache.values)]
    batch.seq_lens[1], batch.slots[1] = 0, -1
    out = kernels.rope_attention(q, k, v, rotary, cache, batch, params)
    assert out[0].isfinite().all() and not out[1].any()
    slot = int(batch.slots[0])
    for pages, before in zip((cache.keys, cache.values), want, strict=True):
        pages[slot // cache.block_size, :, slot % cache.block_size] = before[slot // cache.block_size, :, slot % cache.block_size]
        assert torch.equal(pages.nan_to_num(99.0), before.nan_to_num(99.0))


@pytest.mark.parametrize("case", [Case([(1, 37), (1, 5), (3, 20)], dtype=BF16), Case(ROWS, cache_dtype=torch.int8, dtype=BF16)])
def test_other_steps_use_two_launches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prefill rows, and caches of another dtype than the queries."""
    q, cache, batch, params = case.build()
    k, v = (torch.randn(q.shape[0], case.kv_heads, case.size).to(q.dtype) for _ in range(2))
    seen: list[Tensor] = []
    monkeypatch.setattr(kernels, "rope_store", lambda q, *rest: seen.append(q) or q)
    out = kernels.rope_attention(q, k, v, Rotary(batch.positions, None, False), cache, batch, params)
    assert len(seen) == 1 and relative_error(out, expected_attention(q, cache, batch, params)) < TOLERANCE[BF16]
