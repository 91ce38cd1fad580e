"""Paged attention in the interpreter against float64, over ragged batches whose unused parts are poisoned."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import TOLERANCE, Case, expected_attention, padded, relative_error

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.reference import attention as reference
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention import tiles
from stoker.kernels.triton.attention.arguments import SplitScratch
from stoker.kernels.triton.attention.tiles import AttentionTile, Splits, choose_splits
from stoker.kernels.triton.attention.warp_specialized.launch import has_tensor_map
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.types import LONG_SPLIT, AttentionParams

MIXED = [(1, 37), (1, 5), (1, 16), (3, 3), (13, 50)]
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
WITH_MEANS: dict[str, Any] = {"mean": True, "cache_dtype": FP8, "heads": 3, "kv_heads": 1}
TREES = {1: [-1, 0, 0, 1, 2, 2], 3: [-1, 0, 0]}

CASES = {
    "mixed": Case(MIXED),
    "decode only": Case([(1, 37), (1, 5), (1, 130)]),
    "prefill only": Case([(16, 16), (1, 9), (21, 21)]),
    "long prefix": Case([(3, 200)], block_size=32, dtype=BF16),
    "draft tokens": Case([(1, 37), (5, 130), (2, 40), (3, 20)], heads=8, kv_heads=2, dtype=BF16, size=64),
    "draft tokens, head 128": Case([(9, 50), (4, 131), (1, 9)], heads=12, kv_heads=2, dtype=BF16, size=128, block_size=32),
    "draft tokens, fp8": Case([(5, 130), (3, 40)], heads=8, kv_heads=1, dtype=BF16, size=128, cache_dtype=FP8),
    "draft tokens, window": Case([(5, 90), (3, 40)], heads=8, kv_heads=1, dtype=BF16, window=20),
    "tree": Case([(1, 37), (6, 130), (2, 40), (3, 20)], heads=8, dtype=BF16, trees=TREES),
    "tree, fp8 window": Case(
        [(1, 97), (6, 130), (2, 140), (3, 120)], heads=8, kv_heads=1, cache_dtype=FP8, dtype=BF16, window=64, trees=TREES
    ),
    "tree, int8": Case([(1, 37), (6, 37), (2, 40), (3, 20)], cache_dtype=torch.int8, block_size=32, trees=TREES),
    "tree, latent fp8": Case(
        [(1, 9), (6, 21)], heads=8, kv_heads=1, size=576, latent=True, dtype=BF16, cache_dtype=FP8, trees={1: TREES[1]}
    ),
    "tree, sinks, soft cap": Case([(1, 37), (6, 60), (9, 40)], sinks=True, softcap=4.0, trees={1: TREES[1]}),
    "tree of 64 nodes": Case([(64, 90), (5, 9)], heads=2, size=32, trees={0: [-1, *(i // 3 for i in range(63))]}),
    "level of a tree": Case([(2, 30), (2, 77)], trees={0: [-1, -1, 0, 0, 1], 1: [-1, -1, -1, 1, 1, 2]}),
    "one key": Case([(1, 1), (1, 1)]),
    "padding tokens": Case(MIXED, padding_tokens=5),
    "head 16": Case(MIXED, size=16),
    "head 40": Case(MIXED, size=40),
    "head 80": Case(MIXED, size=80, dtype=BF16),
    "head 96": Case(MIXED, size=96, dtype=FP16),
    "head 128": Case(MIXED, size=128, dtype=BF16),
    "head 192": Case(MIXED, size=192, dtype=BF16),
    "head 192, values 128": Case(MIXED, size=192, value_size=128, dtype=BF16),
    "head 256": Case(MIXED, size=256, dtype=BF16),
    "latent": Case([(1, 19), (1, 40), (5, 21)], heads=20, kv_heads=1, size=576, latent=True, dtype=BF16),
    "latent fp8": Case([(1, 19), (1, 40), (5, 21)], heads=8, kv_heads=1, size=576, latent=True, dtype=BF16, cache_dtype=FP8),
    "one key head": Case(MIXED, heads=7, kv_heads=1),
    "groups of three": Case(MIXED, heads=6, kv_heads=2, dtype=FP16),
    "more heads than a tile holds": Case([(1, 37), (1, 5), (4, 9)], heads=80, kv_heads=2, size=32, dtype=BF16),
    "rows without queries": Case([(1, 37), (3, 5), (0, 0), (4, 9), (0, 12)]),
    "no groups": Case(MIXED, heads=3, kv_heads=3),
    "block 32": Case(MIXED, block_size=32, dtype=BF16),
    "block 64": Case([(1, 150), (1, 64), (9, 70)], block_size=64, dtype=BF16),
    "block 128": Case([(1, 150), (1, 64), (9, 70)], block_size=128, dtype=BF16),
    "window": Case([(1, 90), (1, 5), (40, 77), (3, 100)], window=20, dtype=BF16),
    "window of one": Case(MIXED, window=1),
    "chunk": Case([(1, 90), (1, 33), (40, 77)], chunk=32, dtype=BF16),
    "soft cap": Case(MIXED, softcap=5.0),
    "alibi": Case(MIXED, alibi=True),
    "soft cap, alibi": Case(MIXED, alibi=True, softcap=5.0),
    "sinks": Case(MIXED, sinks=True),
    "sinks, window": Case([(1, 90), (1, 5), (20, 50)], sinks=True, window=12, dtype=BF16, block_size=32),
    "prefix": Case([(1, 30), (20, 20), (20, 40)], prefix_lens=[10, 13, 30]),
    "prefix, window": Case([(20, 20), (20, 40)], prefix_lens=[13, 30], window=9),
    "prefix, chunk": Case([(20, 20), (20, 40)], prefix_lens=[13, 30], chunk=16),
    "int8": Case(MIXED, cache_dtype=torch.int8),
    "int8 bf16": Case(MIXED, cache_dtype=torch.int8, dtype=BF16, heads=8),
    "fp8 bf16": Case(MIXED, cache_dtype=FP8, dtype=BF16, size=128),
    "fp8 soft cap": Case(MIXED, cache_dtype=FP8, dtype=FP16, softcap=3.0),
    "key means": Case([(1, 37), (1, 1), (1, 1024), (1, 1025), (2, 2), (9, 1029)], mean=True, cache_dtype=FP8, dtype=BF16),
    "key means fp16": Case([(1, 2100), (5, 1040)], **WITH_MEANS, dtype=FP16, block_size=64),
    "key means int8": Case([(1, 37), (1, 1030), (5, 1030)], mean=True, cache_dtype=torch.int8),
    "key means fp32": Case([(1, 1030), (2, 2050)], **WITH_MEANS),
    "key means, head 128": Case([(1, 1030), (3, 1030)], **WITH_MEANS, size=128, dtype=BF16),
    "key means, block 128": Case([(1, 1030), (9, 1100)], **WITH_MEANS, dtype=BF16, block_size=128),
    "key means, window": Case([(1, 1100), (1, 1024), (40, 1130), (3, 50)], **WITH_MEANS, window=90, dtype=BF16),
    "key means, window to the first": Case([(1, 20), (5, 21)], **WITH_MEANS, window=20, dtype=BF16),
    "key means, chunk": Case([(1, 1100), (40, 1130)], **WITH_MEANS, chunk=48, dtype=BF16),
    "key means, soft cap, alibi": Case([(1, 1030), (5, 1030)], **WITH_MEANS, softcap=9.0, alibi=True, dtype=FP16),
    "key means, sinks": Case([(1, 1030), (5, 1030)], **WITH_MEANS, sinks=True, dtype=BF16),
    "key means, prefix": Case([(9, 1040), (20, 40)], **WITH_MEANS, prefix_lens=[1038, 13], dtype=BF16),
    "fp8 alibi": Case(MIXED, cache_dtype=FP8, dtype=FP16, alibi=True, size=80),
}


def check(case: Case) -> None:
    q, cache, batch, params = case.build()
    out = kernels.attention(q, cache, batch, params)
    assert out.shape == (q.shape[0], case.heads * (case.value_size or case.size))
    real = int(batch.query_starts[-1])
    assert relative_error(out[:real], expected_attention(q, cache, batch, params)) < TOLERANCE[case.dtype]
    assert not kernels._finished_counters(q.device).any() and not kernels._flag_words(q.device).any()


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    check(CASES[name])


CAPTURED = [name for name, case in CASES.items() if case.trees is None]


@pytest.mark.parametrize("name", [*CAPTURED, "a chunk of one token", "a padding row with the index of a token"])
def test_a_captured_step_finds_its_decodes(name: str) -> None:
    """The number of decodes is on the device: a launch for decodes and one for prefills have all rows, and padding."""
    case = CASES.get(name) or Case([(1, 37), (1, 5), (1, 1), (4, 9), (1, 40)] if "chunk" in name else [(1, 37), (4, 9)])
    q, cache, batch, params = case.build()
    expected, real = expected_attention(q, cache, batch, params), int(batch.query_starts[-1])
    out = kernels.attention(q, cache, padded(batch, 3 if name in CAPTURED else 9), params)
    assert relative_error(out[:real], expected) < TOLERANCE[case.dtype]
    assert not kernels._finished_counters(q.device).any() and not kernels._flag_words(q.device).any()


@pytest.mark.parametrize("splits", [Splits(1), Splits(4)])
def test_each_launch_of_a_captured_step_computes_its_rows(splits: Splits) -> None:
    q, cache, batch, params = Case(MIXED, padding_tokens=5).build()
    expected, tile = expected_attention(q, cache, batch, params), AttentionTile(16, 16, 4, 2)
    for launch, tokens in ((kernels.decode, range(3)), (kernels.prefill, range(3, int(batch.query_starts[-1])))):
        out = torch.full(q.shape, float("nan"))
        launch(q, cache, padded(batch, 6), params, out, tile, splits)
        is_written = torch.zeros(len(q), dtype=torch.bool).index_fill(0, torch.tensor(tokens), True)
        assert out[~is_written].isnan().all()
        assert relative_error(out[tokens.start : tokens.stop].flatten(1), expected[tokens.start : tokens.stop]) < 1e-5


@pytest.mark.parametrize("most", [1 << 20, 700, 1])
@pytest.mark.parametrize(
    "name",
    [
        "mixed",
        "latent",
        "tree",
        "tree, int8",
        "level of a tree",
        "window",
        "chunk",
        "soft cap, alibi",
        "sinks",
        "prefix",
        "prefix, window",
        "int8",
        "key means int8",
    ],
)
def test_the_reference_splits_many_queries(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_SCORES", most)
    q, cache, batch, params = CASES[name].build()
    for pages in (cache.keys, cache.values):
        if pages is not None and pages.is_floating_point():
            pages.nan_to_num_()  # the reference multiplies unused slots by zero, so they must be finite
    batch.block_tables.clamp_(max=len(cache.keys) - 1)
    out = reference.attention(q, cache, batch, params)
    assert relative_error(out, expected_attention(q, cache, batch, params)) < TOLERANCE[CASES[name].dtype]


@pytest.mark.parametrize("cache_dtype", [FP8, torch.int8])
def test_an_8_bit_cache_without_scales_has_scale_one(cache_dtype: torch.dtype) -> None:
    q, cache, batch, params = Case(MIXED, cache_dtype=cache_dtype, dtype=BF16).build()
    cache.key_scale = cache.value_scale = None
    params = replace(params, scale=params.scale / 50)  # stored values without a scale are larger than the real ones of other cases
    out = kernels.attention(q, cache, batch, params)
    real = int(batch.query_starts[-1])
    assert relative_error(out[:real], expected_attention(q, cache, batch, params)) < TOLERANCE[BF16]


@pytest.mark.parametrize("seed", range(12))
def test_random_combinations(seed: int) -> None:
    pick = random.Random(seed)
    decodes = [(1, pick.randint(1, 90)) for _ in range(pick.randint(0, 3))]
    prefills = [(n, n + pick.choice((0, pick.randint(1, 60)))) for n in (pick.randint(2, 30) for _ in range(pick.randint(0, 2)))]
    kv_heads = pick.choice((1, 2))
    dtype = pick.choice((BF16, FP16, FP32))
    check(
        Case(
            decodes + prefills or [(1, 1)],
            heads=kv_heads * pick.choice((1, 2, 3, 5)), kv_heads=kv_heads, size=pick.choice((32, 64, 72, 80, 128)),
            block_size=pick.choice((16, 32, 64)), dtype=dtype, cache_dtype=pick.choice((None, None, torch.int8, FP8)),
            window=pick.choice((None, None, 7, 33)), softcap=pick.choice((None, 10.0)),
            alibi=pick.random() < 0.3, sinks=pick.random() < 0.3,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "splits"),
    [
        (AttentionTile(16, 16, 4, 2), Splits(1)),
        (AttentionTile(16, 64, 4, 2), Splits(2)),
        (AttentionTile(16, 16, 4, 2), Splits(3)),
        (AttentionTile(16, 16, 4, 2), Splits(8, 2)),
        (AttentionTile(16, 64, 4, 2), Splits(16)),
    ],
)
def test_results_do_not_depend_on_the_splits(tile: AttentionTile, splits: Splits) -> None:
    q, cache, batch, params = Case([(1, 90), (1, 1), (1, 40), (9, 60)], sinks=True, block_size=32).build()
    out = torch.empty(q.shape)
    kernels.decode(q, cache, batch, params, out, tile, splits)
    kernels.prefill(q, cache, batch, params, out, tile, splits)
    assert relative_error(out.flatten(1), expected_attention(q, cache, batch, params)) < 1e-5


def with_split_tokens(batch: ForwardBatch, tokens: int) -> ForwardBatch:
    return replace(batch, split_tokens=torch.tensor([tokens], dtype=torch.int32))


RAGGED = {
    "equal": [100] * 5,
    "one long": [9, 300, 5, 7],
    "one key and a whole number of tiles": [1, 16, 128, 129, 127],
    "ascending": [16 * i + i % 3 for i in range(1, 9)],
    "random": [random.Random(3).randint(1, 250) for _ in range(7)],
}


@pytest.mark.parametrize("name", RAGGED)
def test_the_length_of_splits_is_read_on_the_device(name: str) -> None:
    """The dummy step of a captured graph has 0. Rows that need more splits than the grid has get longer ones."""
    rows = [(1, length) for length in RAGGED[name]]
    q, cache, batch, params = Case(rows, dtype=BF16, cache_dtype=FP8, heads=8, block_size=32, sinks=True).build()
    expected = expected_attention(q, cache, batch, params)
    grids = [(AttentionTile(16, 16, 4, 2), 2), (AttentionTile(16, 16, 4, 2), 7), (AttentionTile(16, 64, 4, 2), 16)]
    for i, tokens in enumerate((0, 1, 16, 40, 64, 1 << 30), start=list(RAGGED).index(name)):
        tile, count = grids[i % 3]  # each grid with each of the lengths, and, in some test, with each number of tokens
        out = torch.full(q.shape, float("nan"), dtype=BF16)
        kernels.decode(q, cache, with_split_tokens(batch, tokens), params, out, tile, Splits(count, 99, by_lengths=True))
        assert relative_error(out.flatten(1), expected) < TOLERANCE[BF16]
        assert not kernels._finished_counters(q.device).any() and not kernels._flag_words(q.device).any()


@pytest.mark.parametrize("is_padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows[0][0] == 1])
def test_rows_are_split_by_the_length_that_the_step_has(name: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own choice on a device with one SM, which any row fills."""
    case = CASES[name]
    q, cache, batch, params = case.build()
    kernels._empty_output(q, cache)  # memory that all tests share is allocated for the real number of SMs
    monkeypatch.setattr(kernels, "num_sms", lambda device: 1)
    monkeypatch.setattr(tiles, "SHORT_SPLIT", 16)
    real = int(batch.query_starts[-1])
    expected = expected_attention(q, cache, batch, params)
    batch = with_split_tokens(padded(batch, 3) if is_padded and case.trees is None else batch, 33)
    out = kernels.attention(q, cache, batch, params)
    assert relative_error(out[:real], expected) < TOLERANCE[case.dtype]
    assert not kernels._finished_counters(q.device).any() and not kernels._flag_words(q.device).any()


@pytest.mark.parametrize("splits", [Splits(1), Splits(3), Splits(8, 2), Splits(16)])
@pytest.mark.parametrize("block_n", [16, 64, 128])
def test_key_means_in_splits_that_begin_anywhere(block_n: int, splits: Splits) -> None:
    tile = AttentionTile(16, block_n, 4, 2)
    q, cache, batch, params = Case([(1, 2060), (1, 1), (1, 1023), (2, 1026)], **WITH_MEANS, dtype=BF16, block_size=32).build()
    out = torch.empty(q.shape, dtype=BF16)
    kernels.decode(q, cache, batch, params, out, tile, splits)
    kernels.prefill(q, cache, batch, params, out, tile, splits)
    expected = expected_attention(q, cache, batch, params)
    assert relative_error(out.flatten(1), expected) < TOLERANCE[BF16]
    kernels.decode(q, cache, with_split_tokens(batch, 900), params, out, tile, replace(splits, by_lengths=True))
    assert relative_error(out.flatten(1), expected) < TOLERANCE[BF16]


def test_flags_of_results_whose_bits_are_all_zero() -> None:
    """With one key per split, a score of 0 and a value of 0, all bits of a result are zero, like those of a word that was not written."""
    q, cache, batch, params = Case([(1, 64)], size=64, block_size=16, dtype=BF16).build()
    assert cache.values is not None
    q.zero_(), cache.values.zero_()
    batch.seq_lens[:] = 17
    out = torch.full(q.shape, 9.0, dtype=BF16)
    tile, splits = AttentionTile(16, 16, 4, 2), Splits(16)
    assert kernels.flag_columns(16, 2, 64, tile.num_warps)
    kernels.decode(q, cache, batch, params, out, tile, splits)
    assert not out.any() and not kernels._flag_words(q.device).any()


DRAFTED = {
    "chains": (Case([(5, 130), (3, 40), (1, 9)], heads=8, kv_heads=2, dtype=BF16, size=64), 20),
    "groups of three": (Case([(4, 77), (2, 2)], heads=6, kv_heads=2, dtype=FP16, size=128, sinks=True), 12),
    "trees": (Case([(5, 33), (6, 130)], heads=4, kv_heads=1, dtype=BF16, cache_dtype=FP8, size=64, trees={1: TREES[1]}), 24),
}


@pytest.mark.parametrize(("case", "rows"), DRAFTED.values(), ids=DRAFTED)
def test_draft_tokens_combine_by_flags(case: Case, rows: int) -> None:
    q, cache, batch, params = case.build()
    out, tile = torch.empty(q.shape, dtype=q.dtype), AttentionTile(32, 16, 4, 2)
    assert kernels.flag_columns(16, 32, q.shape[2], tile.num_warps, rows) and batch.num_decodes == 0
    for _ in range(2):  # the first launch leaves the flags as it found them
        out.fill_(float("nan"))
        kernels.prefill(q, cache, batch, params, out, tile, Splits(16))
        assert relative_error(out.flatten(1), expected_attention(q, cache, batch, params)) < TOLERANCE[q.dtype]
        assert not kernels._flag_words(q.device).any()


def test_rows_without_keys_give_zeros() -> None:
    q, cache, batch, params = Case([(1, 37), (1, 5)]).build()
    batch.seq_lens[1] = 0
    assert not kernels.attention(q, cache, batch, params)[1].any()


def test_caches_may_be_views_of_one_allocation() -> None:
    q, cache, batch, params = Case(MIXED).build()
    both = torch.stack((cache.keys, cache.values), dim=1)
    apart = KVCache(both[:, 0], both[:, 1])
    assert relative_error(kernels.attention(q, apart, batch, params), expected_attention(q, cache, batch, params)) < 1e-5


def test_splits_fill_the_device_and_cut_long_rows() -> None:
    assert choose_splits(8, 16, 1024, 132) == Splits(16, 1)  # batch 1, context 1,024: one block per split
    assert choose_splits(512, 16, 1024, 132) == Splits(1, 1)
    assert choose_splits(8, 2000, 128_000, 132) == Splits(16, 1)  # one CTA per SM
    many = choose_splits(2048, 2000, 128_000, 132)
    assert many.count == 16 and many.min_tiles * 64 == LONG_SPLIT


def test_splits_of_decodes_cut_long_rows_while_the_grid_is_small() -> None:
    def splits(rows: int, max_seq_len: int) -> Splits:
        return choose_splits(8 * rows, max_seq_len // 64, max_seq_len, 132, is_decode=True)

    assert splits(8, 6144) == choose_splits(64, 96, 6144, 132) == Splits(2, 1)  # these do not fill the device
    assert splits(33, 1024) == Splits(1)
    assert splits(33, 6144) == splits(48, 6144) == Splits(8, 1024 // 64)
    assert splits(48, 16_384) == Splits(8, 2048 // 64)
    assert splits(50, 6144) == splits(600, 6144) == Splits(1)
    assert splits(33, 131_072) == Splits(16, LONG_SPLIT // 64)


def test_a_grid_of_decodes_with_known_lengths_has_room_for_short_splits() -> None:
    def count(rows: int, max_seq_len: int) -> int:
        splits = choose_splits(8 * rows, max_seq_len // 64, max_seq_len, 132, is_decode=True, has_split_tokens=True)
        assert splits.by_lengths == (splits.count > 1 and rows > 16)
        return splits.count

    assert count(8, 6144) == 2  # these do not fill the device
    assert [count(rows, 512) for rows in (17, 64, 600)] == [1, 1, 1]
    assert [count(rows, 6144) for rows in (33, 48, 64, 128, 256, 512)] == [16, 8, 8, 4, 2, 1]
    assert [count(rows, 131_072) for rows in (33, 256)] == [16, 16]  # as LONG_SPLIT requires


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size"), [(8192, 32, 8, 128), (8192, 128, 1, 576), (512, 32, 8, 128), (1, 32, 8, 128)]
)
def test_scratch_memory_of_splits_is_bounded(tokens: int, heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch of a step with `tokens` tokens in 8 rows, of which one has 131,072 keys."""
    sizes: list[int] = []
    by_flags: list[bool] = []

    def launch(*args: object, **kwargs: object) -> None:
        scratch = next(group for group in args if isinstance(group, SplitScratch))
        sizes.append(0 if scratch.partial_ptr is None else scratch.partial_ptr.numel() * 4)
        by_flags.append(scratch.words_ptr is not None)

    def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def index(count: int) -> torch.Tensor:
        return meta(count, dtype=torch.int32)

    for name in ("decode_attention_kernel", "prefill_attention_kernel"):
        monkeypatch.setattr(kernels, name, defaultdict(lambda: launch))
    monkeypatch.setattr(kernels, "pdl_launch_options", lambda x: {})
    monkeypatch.setattr(kernels, "device_tuning", lambda device: tuning_for("NVIDIA H200", 90))
    monkeypatch.setattr(kernels, "supports_warp_specialized_prefill", lambda *_: False)  # which has no splits
    q, pages = meta(tokens, heads, size), meta(9, kv_heads, 64, size)
    rows = min(tokens, 8)
    decodes = rows if tokens == 1 else 0
    tables = meta(rows, 2048, dtype=torch.int32)
    batch = ForwardBatch(*[index(tokens)] * 3, index(rows + 1), index(rows), tables, decodes, tokens, 1 << 17)
    kernels.attention(q, KVCache(pages, pages), batch, AttentionParams(0.1))
    assert sizes[0] <= kernels.MAX_SCRATCH_BYTES
    assert sizes[0] > 0 or by_flags[0] or tokens * heads > 1 << 19, "too few CTAs for a long row"


@pytest.mark.parametrize(
    ("pages", "has_map"),
    [
        (torch.empty(4, 2, 16, 64, dtype=torch.bfloat16), True),
        (torch.empty(4, 3, 16, 64, dtype=torch.bfloat16)[1:, 1:], True),  # keys beside values
        (torch.empty(4, 2 * 16 * 64 + 32, dtype=torch.bfloat16)[:, 32:].view(4, 2, 16, 64), False),  # blocks do not begin at whole rows
        (torch.empty(4 * 2 * 16 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 2, 16, 64), False),  # no multiple of 16 bytes
    ],
)
def test_one_tensor_map_has_all_rows_of_a_cache(pages: torch.Tensor, has_map: bool) -> None:
    assert has_tensor_map(pages) == has_map


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 3, 64)}, "3 query heads are no multiple of 2 key heads"),
        ({"q": torch.zeros(1, 4, 64, dtype=torch.float64)}, "float64 queries"),
        ({"keys": torch.zeros(4, 2, 24, 64)}, "block size 24"),
        ({"keys": torch.zeros(4, 16, 2, 64).transpose(1, 2)}, "page must be dense"),
    ],
)
def test_refused(change: dict[str, torch.Tensor], words: str) -> None:
    q, cache, batch, _ = Case([(1, 5)]).build()
    cache = KVCache(change.get("keys", cache.keys), cache.values)
    with pytest.raises(ValueError, match=words):
        kernels.attention(change.get("q", q), cache, batch, AttentionParams(1.0))


def test_latent_keys_are_stored_with_all_features() -> None:
    q, cache, batch, params = Case([(1, 5)], latent=True, **WITH_MEANS).build()
    with pytest.raises(ValueError, match="its keys are the values too"):
        kernels.attention(q, cache, batch, params)
