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
    """The arguments of `rope_attention` for decode rows whose last keys and values are not in the cache yet: its slots hold NaN or 99."""
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
            pages[slot // case.block_size, :, slot % case.block_size] = float("nan") if pages.is_floating_point() else 99
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


FP8 = torch.float8_e4m3fn
WIDE: dict[str, Any] = {"size": 128, "dtype": BF16, "cache_dtype": FP8, "block_size": 64}
NARROW: dict[str, Any] = {"size": 64, "dtype": FP16, "cache_dtype": torch.int8, "block_size": 32}
# case, rotated features, interleaved, normed
CASES_8_BIT = {
    "half of Llama-3.1-70B": (Case([(1, 90)], heads=16, mean=True, **WIDE), 128, False, False),
    "two rows": (Case([(1, 64), (1, 65)], mean=True, **WIDE), 128, False, False),
    "a row of one key, which has no mean": (Case([(1, 1)], mean=True, **WIDE), 128, False, False),
    "two means": (Case([(1, 1100)], heads=2, kv_heads=1, mean=True, **WIDE), 128, False, False),
    "one head of a group": (Case([(1, 40)], heads=2, mean=True, **WIDE), 128, False, False),
    "norms": (Case([(1, 40)], mean=True, **WIDE), 128, False, True),
    "interleaved": (Case([(1, 40)], mean=True, **WIDE), 128, True, False),
    "half of a head": (Case([(1, 40)], mean=True, **WIDE), 64, False, True),
    "half of a head, interleaved": (Case([(1, 40)], mean=True, **WIDE), 64, True, False),
    "no rotation": (Case([(1, 40)], mean=True, **WIDE), 0, False, True),
    "sinks and a window": (Case([(1, 90)], sinks=True, window=30, mean=True, **WIDE), 128, False, False),
    "window": (Case([(1, 200), (1, 20)], window=30, mean=True, **WIDE), 128, False, False),
    "window of one": (Case([(1, 65)], window=1, mean=True, **WIDE), 128, False, False),
    "chunk": (Case([(1, 90), (1, 97)], chunk=32, mean=True, **WIDE), 128, False, False),
    "the first key of a chunk": (Case([(1, 65)], chunk=64, mean=True, **WIDE), 128, False, False),
    "soft cap": (Case([(1, 90)], softcap=5.0, mean=True, **WIDE), 128, False, False),
    "ALiBi": (Case([(1, 90)], alibi=True, mean=True, **WIDE), 0, False, False),
    "prefix": (Case([(1, 90), (1, 40), (1, 65)], prefix_lens=[90, 10, 0], mean=True, **WIDE), 128, False, False),
    "256 wide, values of 64": (Case([(1, 40)], **WIDE | {"size": 256, "value_size": 64}), 256, False, False),
    "int8": (Case([(1, 90)], **NARROW), 64, False, False),
    "int8, 15 heads of a group": (Case([(1, 40)], heads=30, **NARROW), 64, False, False),
    "int8, two rows, normed": (Case([(1, 33), (1, 5)], **NARROW), 64, True, True),
    "int8, chunk and prefix": (Case([(1, 90), (1, 33)], chunk=16, prefix_lens=[85, 33], **NARROW), 64, False, False),
    "int8, everything": (Case([(1, 90), (1, 5)], softcap=9.0, sinks=True, window=33, alibi=True, **NARROW), 32, True, True),
}


def new_8_bit_tokens(case: Case, dim: int, interleaved: bool, is_normed: bool) -> tuple[Any, ...]:
    """The arguments of `rope_attention` for decode rows over a balanced 8-bit cache, at the positions of their last keys."""
    q, k, v, _, cache, batch, params = new_tokens(case, 0, False)
    cache.key_balance = torch.rand(case.kv_heads, 2, case.size) + 0.5
    batch.positions = batch.seq_lens - 1
    cos_sin = table(dim, int(batch.seq_lens.max())) if dim else None
    return q, k, v, Rotary(batch.positions, cos_sin, interleaved, norms(case.size) if is_normed else None), cache, batch, params


def results_of(arguments: tuple[Any, ...], tile: AttentionTile, splits: Splits, in_one_launch: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the bytes of keys and values. The arguments stay as they are."""
    q, k, v, rotary, cache, batch, params = arguments
    q, out = q.clone(), kernels._empty_output(q, cache)
    cache = replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
    if in_one_launch:
        kernels.decode(q, cache, batch, params, out, tile, splits, kernels.StepTokens(k, v, rotary))
    else:
        kernels.decode(kernels.rope_store(q, k, v, rotary, cache, batch.slots), cache, batch, params, out, tile, splits)
    return out, cache.keys.view(torch.int8), cache.values.view(torch.int8)


def check_8_bit(
    arguments: tuple[Any, ...], tile: AttentionTile = AttentionTile(16, 64, 4, 3), splits: Splits = Splits(1), bound: float = 0.0
) -> None:  # fmt: skip
    """One launch stores the same bytes as `rope_store` before the attention, and its output differs by at most `bound`."""
    two, one = (results_of(arguments, tile, splits, in_one_launch) for in_one_launch in (False, True))
    assert torch.equal(two[1], one[1]) and torch.equal(two[2], one[2])
    assert relative_error(one[0], two[0]) <= bound
    assert not kernels._finished_counters(two[0].device).any() and not kernels._flag_words(two[0].device).any()


@pytest.mark.parametrize("splits", [Splits(1), Splits(2)])
@pytest.mark.parametrize("name", CASES_8_BIT)
def test_8_bit_caches_get_the_same_bytes_from_one_launch(name: str, splits: Splits) -> None:
    check_8_bit(new_8_bit_tokens(*CASES_8_BIT[name]), splits=splits)


@pytest.mark.parametrize("splits", [Splits(3), Splits(8, 2), Splits(16), Splits(16, by_lengths=True)])
def test_8_bit_caches_with_splits(splits: Splits) -> None:
    case = Case([(1, 200), (1, 1), (1, 64), (1, 65)], mean=True, sinks=True, **WIDE)
    arguments = new_8_bit_tokens(case, 128, False, False)
    arguments[5].split_tokens = torch.tensor([32], dtype=torch.int32)
    check_8_bit(arguments, AttentionTile(16, 32, 4, 3), splits)


@pytest.mark.parametrize("mean", [False, True])
def test_unbalanced_8_bit_caches(mean: bool) -> None:
    """Keys are rounded to the queries' dtype and quantized. `rope_store` refuses means without a balance."""
    arguments = new_8_bit_tokens(Case([(1, 40)], mean=mean, **WIDE), 128, False, False)
    arguments[4].key_balance = None
    if mean:
        with pytest.raises(ValueError, match="key_balance"):
            kernels.rope_attention(*arguments)
    else:
        check_8_bit(arguments)


def test_padding_rows_of_8_bit_caches() -> None:
    arguments = new_8_bit_tokens(Case([(1, 37), (1, 5)], mean=True, **WIDE), 128, False, False)
    batch = arguments[5]
    batch.seq_lens[1], batch.slots[1], batch.positions[1] = 0, -1, 0
    check_8_bit(arguments)
    assert not results_of(arguments, AttentionTile(16, 64, 4, 3), Splits(2), in_one_launch=True)[0][1].any()


@pytest.mark.parametrize("group", [1, 4, 8, 15, 16, 31])
@pytest.mark.parametrize("shared", [WIDE, NARROW], ids=["e4m3", "int8"])
def test_8_bit_steps_of_one_row_use_one_launch(group: int, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile holds the queries of all heads of a group, and the key."""
    arguments = new_8_bit_tokens(Case([(1, 90)], heads=2 * group, mean=True, **shared), shared["size"], False, False)
    two = results_of(arguments, AttentionTile(32, 64, 4, 3), Splits(1), in_one_launch=False)
    monkeypatch.setattr(kernels, "rope_store", None)
    out = kernels.rope_attention(*arguments)
    assert relative_error(out, two[0].flatten(1)) < TOLERANCE[shared["dtype"]]
    assert torch.equal(arguments[4].keys.view(torch.int8), two[1]) and torch.equal(arguments[4].values.view(torch.int8), two[2])


UNSUPPORTED_8_BIT = {
    "eight rows": (Case([(1, 20)] * 8, **WIDE), 128),
    "32 heads of a group": (Case([(1, 20)], heads=32, kv_heads=1, **WIDE), 128),
    "a quarter of a head rotates": (Case([(1, 20)], **WIDE), 32),
    "heads that are not read in pairs": (Case([(1, 20)], **WIDE | {"size": 80}), 80),
    "float32": (Case([(1, 20)], **WIDE | {"dtype": FP32}), 128),
}


@pytest.mark.parametrize("name", UNSUPPORTED_8_BIT)
def test_other_8_bit_steps_use_two_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dim = UNSUPPORTED_8_BIT[name]
    monkeypatch.setattr(kernels, "decode", lambda *arguments, **named: _assert_no_new_tokens(**named))
    kernels.rope_attention(*new_8_bit_tokens(case, dim, False, False))


@pytest.mark.parametrize(("num_rows", "before_fused_layer", "in_one_launch"), [(2, True, True), (2, False, False), (3, True, False)])
def test_two_rows_of_8_bit_caches_use_one_launch_before_a_fused_layer(
    num_rows: int, before_fused_layer: bool, in_one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For more rows, the fused layer kernel uses the shared memory of all SMs."""
    q, k, v, rotary, cache, batch, params = new_8_bit_tokens(Case([(1, 20)] * num_rows, **WIDE), 128, False, False)
    seen: list[bool] = []
    monkeypatch.setattr(kernels, "decode", lambda *arguments, new=None: seen.append(new is not None))
    kernels.rope_attention(q, k, v, rotary, cache, batch, replace(params, before_fused_layer=before_fused_layer))
    assert seen == [in_one_launch]


def _assert_no_new_tokens(new: object = None) -> None:
    assert new is None


@pytest.mark.parametrize("case", [Case([(1, 37), (1, 5), (3, 20)], dtype=BF16), Case(ROWS, cache_dtype=torch.int8, dtype=BF16)])
def test_other_steps_use_two_launches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prefill rows, and caches of another dtype than the queries."""
    q, cache, batch, params = case.build()
    k, v = (torch.randn(q.shape[0], case.kv_heads, case.size).to(q.dtype) for _ in range(2))
    seen: list[Tensor] = []
    monkeypatch.setattr(kernels, "rope_store", lambda q, *rest: seen.append(q) or q)
    out = kernels.rope_attention(q, k, v, Rotary(batch.positions, None, False), cache, batch, params)
    assert len(seen) == 1 and relative_error(out, expected_attention(q, cache, batch, params)) < TOLERANCE[BF16]
