"""Kernels on the device against float64, on random inputs of ragged batches. The sizes differ from run to run."""

from __future__ import annotations

import random

import pytest
import torch

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.kernels.reference import attention as attention_reference
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import rope as rope_reference
from stoker.kernels.reference import sampling as sampling_reference
from stoker.kernels.types import MEAN_TOKENS, AttentionParams, DrawParams, Fusion, HeadNorms, Rotary

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert not out.isnan().any()
    return float((out.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("parts", ["", "b", "n", "g", "r", "ngr"])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65, 300])
def test_linear(rows: int, parts: str, dtype: torch.dtype) -> None:
    n, k = random.choice([96, 1000, 4096]), random.choice([72, 576, 4096])
    x = torch.randn(rows, k).to(dtype)
    weight = (torch.randn(2 * n if "g" in parts else n, k) * k**-0.5).to(dtype)
    bias = torch.randn(weight.shape[0]).to(dtype) if "b" in parts else None
    gain = torch.randn(k).to(dtype) if "n" in parts else None
    residual = torch.randn(rows, n).to(dtype) if "r" in parts else None

    def around(move: object) -> Fusion:
        kind, gate = ("rms" if "n" in parts else None), ("silu" if "g" in parts else None)
        moved = [None if t is None else move(t) for t in (gain, residual)]  # type: ignore[operator]
        return Fusion(kind, moved[0], None, 1e-5, gate, moved[1])

    expected = linear_reference.linear(x.double(), weight.double(), None if bias is None else bias.double(), around(torch.Tensor.double))
    result = ops.linear(x.cuda(), weight.cuda(), None if bias is None else bias.cuda(), around(torch.Tensor.cuda))
    assert relative_error(result, expected) < BOUND[dtype]


def ragged(rows: list[tuple[int, int]], kv_heads: int, size: int, block: int, dtype: torch.dtype) -> tuple[KVCache, ForwardBatch]:
    """Rows of (queries, keys) in shuffled blocks of a cache whose unused slots are NaN."""
    needed = [-(-keys // block) for _, keys in rows]
    order = torch.randperm(sum(needed) + 3)
    tables = torch.full((len(rows), max(needed)), 10**9, dtype=torch.int32)
    pages = [torch.full((len(order), kv_heads, block, size), float("nan"), dtype=dtype) for _ in range(2)]
    at = 0
    for row, ((_, keys), count) in enumerate(zip(rows, needed, strict=True)):
        tables[row, :count] = order[at : at + count]
        for position in range(keys):
            for page in pages:
                page[tables[row, position // block], :, position % block] = torch.randn(kv_heads, size).to(dtype)
        at += count
    queries = torch.tensor([q for q, _ in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)))
    lens = torch.tensor([keys for _, keys in rows], dtype=torch.int32)
    total = int(starts[-1])
    empty = torch.zeros(total, dtype=torch.int32)
    decodes = sum(q == 1 for q, _ in rows)
    return KVCache(*pages), ForwardBatch(empty, empty, empty, starts, lens, tables, decodes, int(queries.max()), int(lens.max()))


SIZES = [(32, 8, 128), (9, 3, 64), (4, 4, 80), (16, 4, 96), (12, 2, 192), (8, 1, 256)]
FEATURES = [{"window": 40}, {"chunk": 64}, {"softcap": 20.0}, {"alibi": True}, {"sinks": True}]
SHAPES = [(sizes, {}, block) for sizes, block in zip(SIZES, [64, 16, 32, 64, 128, 16], strict=True)]
SHAPES += [(SIZES[i % 4], features, [16, 32, 64, 128][i % 4]) for i, features in enumerate(FEATURES)]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("sizes", "features", "block"), SHAPES)
def test_attention(sizes: tuple[int, int, int], features: dict, block: int, dtype: torch.dtype) -> None:
    heads, kv_heads, size = sizes
    rows = [(1, random.randrange(1, 700)) for _ in range(3)] + [(q, q + random.randrange(0, 100)) for q in (2, 70, 190)]
    cache, batch = ragged(rows, kv_heads, size, block, dtype)
    q = torch.randn(int(batch.query_starts[-1]), heads, size).to(dtype)
    numbers = {name: value for name, value in features.items() if name not in ("alibi", "sinks")}
    slopes = torch.rand(heads) * 0.2 if "alibi" in features else None
    sinks = torch.randn(heads) if "sinks" in features else None
    clean = KVCache(*(page.nan_to_num().double() for page in (cache.keys, cache.values)))  # type: ignore[union-attr]
    params = AttentionParams(size**-0.5, **numbers, alibi_slopes=slopes, sinks=sinks)
    expected = attention_reference.attention(q.double(), clean, batch, params)
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    moved = {"alibi_slopes": None if slopes is None else slopes.cuda(), "sinks": None if sinks is None else sinks.cuda()}
    params = AttentionParams(size**-0.5, **numbers, **moved)
    result = ops.attention(q.cuda(), KVCache(cache.keys.cuda(), cache.values.cuda()), on_device, params)  # type: ignore[union-attr]
    assert relative_error(result, expected) < BOUND[dtype]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [20, 40, 150])
def test_a_captured_launch_splits_rows_by_the_length_of_each_step(rows: int, cache_dtype: torch.dtype) -> None:
    lens = [random.randrange(1, 100) for _ in range(rows - 2)] + [600, 3000]
    random.shuffle(lens)
    cache, batch = ragged([(1, keys) for keys in lens], 8, 128, 64, torch.bfloat16)
    pages = [page.nan_to_num().to(cache_dtype) for page in (cache.keys, cache.values)]  # type: ignore[union-attr]
    q, params = torch.randn(rows, 32, 128).bfloat16(), AttentionParams(128**-0.5)
    expected = attention_reference.attention(q.double(), KVCache(*(page.double() for page in pages)), batch, params)
    split_tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        rows, 1, 6144, split_tokens=split_tokens,
    )  # fmt: skip
    arguments = (q.cuda(), KVCache(*(page.cuda() for page in pages)), on_device, params)
    ops.attention(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(*arguments)
    for tokens in (0, 64, 512, 1088, 8192, 512):
        split_tokens.fill_(tokens)
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, expected) < BOUND[torch.bfloat16], tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("sizes", "block"), [*((sizes, block) for sizes, _, block in SHAPES[: len(SIZES)]), ((32, 8, 80), 64), ((32, 8, 160), 64)]
)  # the last two: heads in two parts, in tiles of 64 rows
def test_attention_over_8_bit_keys(sizes: tuple[int, int, int], block: int, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check_8_bit_cache(sizes, {}, block, dtype, cache_dtype, 190)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "features", "block", "max_queries"),
    [*(case for size in SIZES[:2] for case in ((size, {}, 64, 190), (size, {}, 16, 1500))), (SIZES[0], {"window": 40}, 16, 190),
     (SIZES[1], {"softcap": 20.0}, 64, 190)],
)  # fmt: skip
def test_attention_over_e4m3_keys_with_means(
    sizes: tuple[int, int, int], features: dict, block: int, max_queries: int, dtype: torch.dtype
) -> None:  # fmt: skip
    check_8_bit_cache(sizes, features, block, dtype, torch.float8_e4m3fn, max_queries, has_mean=True)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize(("sizes", "features", "block"), SHAPES)
def test_rope_attention(sizes: tuple[int, int, int], features: dict, block: int, rows: int, interleaved: bool, dtype: torch.dtype) -> None:
    check_rope_attention(sizes, features, block, rows, interleaved, dtype, normed=False)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize(("sizes", "features", "block"), SHAPES[: len(SIZES)])
def test_rope_attention_with_norms(sizes: tuple[int, int, int], features: dict, block: int, rows: int, dtype: torch.dtype) -> None:
    check_rope_attention(sizes, features, block, rows, False, dtype, normed=True)


def check_rope_attention(
    sizes: tuple[int, int, int], features: dict, block: int, rows: int, interleaved: bool, dtype: torch.dtype, normed: bool
) -> None:  # fmt: skip
    """Decode rows whose last key and value are not in the cache yet."""
    heads, kv_heads, size = sizes
    cache, batch = ragged([(1, random.randrange(1, 700)) for _ in range(rows)], kv_heads, size, block, dtype)
    last = batch.seq_lens.long() - 1
    batch.slots = torch.stack([batch.block_tables[row, at // block] * block + at % block for row, at in enumerate(last)]).int()
    batch.positions = torch.randint(0, 4000, (rows,), dtype=torch.int32)
    angles = torch.rand(4000, size // 4) * 6
    norms = HeadNorms((torch.rand(size) * 2).to(dtype), torch.rand(size) * 2, 1e-5) if normed else None
    rotary = Rotary(batch.positions, torch.cat((angles.cos(), angles.sin()), 1), interleaved, norms)
    qkv = torch.randn(rows, heads + 2 * kv_heads, size).to(dtype)
    numbers = {name: value for name, value in features.items() if name not in ("alibi", "sinks")}
    slopes = torch.rand(heads) * 0.2 if "alibi" in features else None
    sinks = torch.randn(heads) if "sinks" in features else None
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        rows, 1, batch.max_seq_len,
    )  # fmt: skip
    moved = KVCache(cache.keys.cuda(), cache.values.cuda())  # type: ignore[union-attr]
    clean = KVCache(*(page.nan_to_num() for page in (cache.keys, cache.values)))  # type: ignore[union-attr]
    parts = (heads, kv_heads, kv_heads)
    params = AttentionParams(size**-0.5, **numbers, alibi_slopes=slopes, sinks=sinks)
    q = rope_reference.rope_store(*qkv.clone().split(parts, 1), rotary, clean, batch.slots)
    wide = KVCache(clean.keys.double(), clean.values.double())  # type: ignore[union-attr]
    expected = attention_reference.attention(q.double(), wide, batch, params)
    of_device = {"alibi_slopes": None if slopes is None else slopes.cuda(), "sinks": None if sinks is None else sinks.cuda()}
    params = AttentionParams(size**-0.5, **numbers, **of_device)
    moved_norms = None if norms is None else HeadNorms(norms.q_weight.cuda(), norms.k_weight.cuda(), norms.eps)  # type: ignore[union-attr]
    moved_rotary = Rotary(on_device.positions, rotary.cos_sin.cuda(), interleaved, moved_norms)  # type: ignore[union-attr]
    result = ops.rope_attention(*qkv.cuda().split(parts, 1), moved_rotary, moved, on_device, params)
    assert relative_error(result, expected) < BOUND[dtype]
    for pages, stored in ((moved.keys, clean.keys), (moved.values, clean.values)):
        assert relative_error(pages.nan_to_num(), stored) < BOUND[dtype]  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("tokens", [1, 8, 70, 300])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("sizes", "dim"), [((32, 4, 128), 128), ((16, 2, 256), 64), ((8, 4, 256), 256), ((6, 3, 64), 0)])
def test_rope_store_with_norms(sizes: tuple[int, int, int], dim: int, cache_dtype: torch.dtype, tokens: int) -> None:
    """Heads are normalized in place in a fused projection, and rotated, transformed and stored."""
    heads, kv_heads, size = sizes
    is_8_bit = cache_dtype.itemsize == 1
    scale = torch.rand(kv_heads) / 20 + 0.03 if is_8_bit else None
    balance = torch.rand(kv_heads, 2, size) + 0.5 if is_8_bit else None
    mean = torch.randn(kv_heads, 4, size) * 9 if cache_dtype == torch.float8_e4m3fn and size <= 128 else None
    caches = [KVCache(*(torch.zeros(6, kv_heads, 64, size).to(cache_dtype) for _ in range(2)), scale, scale, balance, mean)]
    caches += [KVCache(*(None if t is None else t.cuda() for t in (caches[0].keys, caches[0].values, scale, scale, balance, mean)))]  # type: ignore[arg-type]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, dtype=torch.bfloat16)
    positions, slots = torch.randint(0, 4000, (tokens,), dtype=torch.int32), torch.randperm(6 * 64)[:tokens].int()
    angles = torch.rand(4000, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1) if dim else None
    norms = HeadNorms(torch.rand(size) * 2, torch.rand(size) * 2, 1e-6)
    results = []
    for cache, device in zip(caches, ("cpu", "cuda"), strict=True):
        moved = HeadNorms(norms.q_weight.to(device), norms.k_weight.to(device), norms.eps)  # type: ignore[union-attr]
        rotary = Rotary(positions.to(device), None if table is None else table.to(device), False, moved)
        parts = qkv.clone().to(device).split((heads, kv_heads, kv_heads), 1)
        module = rope_reference if device == "cpu" else ops
        results.append(module.rope_store(*parts, rotary, cache, slots.to(device)))
    assert relative_error(results[1], results[0]) < BOUND[torch.bfloat16]
    for expected, found in zip(*((cache.keys.float(), cache.values.float()) for cache in caches), strict=True):  # type: ignore[union-attr]
        assert relative_error(found, expected) < (3e-2 if is_8_bit else BOUND[torch.bfloat16])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("sizes", "dim", "interleaved"),
    [((32, 8, 128), 128, False), ((32, 4, 128), 128, False), ((32, 2, 128), 64, True), ((9, 3, 64), 64, True), ((8, 1, 256), 0, False)],
)
def test_rope_attention_over_8_bit_keys(
    sizes: tuple[int, int, int], dim: int, interleaved: bool, cache_dtype: torch.dtype, normed: bool, rows: int
) -> None:
    """One launch stores the bytes that `rope_store` stores, several times, and its output is that of two launches."""
    heads, kv_heads, size = sizes
    cache, batch = ragged([(1, random.randrange(1, 3000)) for _ in range(rows)], kv_heads, size, 64, torch.bfloat16)
    batch = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.seq_lens - 1, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        rows, 1, batch.max_seq_len,
    )  # fmt: skip
    last = batch.positions.long()
    batch.slots = (batch.block_tables.gather(1, last[:, None] // 64)[:, 0] * 64 + last % 64).int()
    scale = (torch.rand(kv_heads) / 20 + 0.03).cuda()
    units = [(pages.nan_to_num().cuda() / scale[:, None, None]).clamp(-127, 127) for pages in (cache.keys, cache.values)]  # type: ignore[union-attr]
    balance = (torch.rand(kv_heads, 2, size) + 0.5).cuda()
    mean = torch.randn(kv_heads, 3, size).cuda() * 9 if size <= 128 else None
    angles = torch.rand(3000, dim // 2).cuda() * 6
    norms = HeadNorms((torch.rand(size) * 2).cuda(), (torch.rand(size) * 2).cuda(), 1e-6) if normed else None
    rotary = Rotary(batch.positions, torch.cat((angles.cos(), angles.sin()), 1) if dim else None, interleaved, norms)
    params = AttentionParams(size**-0.5, before_fused_layer=True)
    for _ in range(5):
        qkv = torch.randn(rows, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device="cuda")
        one, two = (KVCache(*(pages.to(cache_dtype) for pages in units), scale, scale, balance, mean) for _ in range(2))
        out = ops.rope_attention(*qkv.clone().split((heads, kv_heads, kv_heads), 1), rotary, one, batch, params)
        q = ops.rope_store(*qkv.split((heads, kv_heads, kv_heads), 1), rotary, two, batch.slots)
        assert relative_error(out, ops.attention(q, two, batch, params)) < 5e-3
        for found, expected in ((one.keys, two.keys), (one.values, two.values)):
            # Another order of summation may round a normed feature to the next bfloat16.
            different = int((found.view(torch.int8) != expected.view(torch.int8)).sum())  # type: ignore[union-attr]
            assert different <= (rows * kv_heads * size // 50 if normed else 0)


def check_8_bit_cache(
    sizes: tuple[int, int, int],
    features: dict,
    block: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    max_queries: int,
    has_mean: bool = False,
) -> None:
    """Decode rows whose keys end before, at and after a multiple of MEAN_TOKENS, and prefill rows of 2, 70 and `max_queries` queries."""
    heads, kv_heads, size = sizes
    rows = [(1, keys) for keys in (1, 1023, 1025, 2500)] + [
        (q, q + seen) for q, seen in ((2, 0), (70, 1000), (max_queries, max_queries + 1900))
    ]
    cache, batch = ragged(rows, kv_heads, size, block, dtype)
    # Unused slots are zeros here: int8 has no NaN.
    pages = [page.nan_to_num().mul(1 if cache_dtype.is_floating_point else 30).to(cache_dtype) for page in (cache.keys, cache.values)]  # type: ignore[union-attr]
    scale = (torch.rand(kv_heads) / 4 + 0.5) / (1 if cache_dtype.is_floating_point else 30)
    means = (torch.randn(kv_heads, -(-int(batch.max_seq_len) // MEAN_TOKENS), size) * 3).bfloat16().float() if has_mean else None
    q = torch.randn(int(batch.query_starts[-1]), heads, size).to(dtype)
    params = AttentionParams(size**-0.5, **features)
    expected = attention_reference.attention(q.double(), KVCache(*pages, scale, scale, key_mean=means), batch, params)
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    moved = KVCache(*(page.cuda() for page in pages), scale.cuda(), scale.cuda(), key_mean=None if means is None else means.cuda())
    assert relative_error(ops.attention(q.cuda(), moved, on_device, params), expected) < BOUND[torch.bfloat16]


def test_sample_agrees_with_the_reference() -> None:
    rows, vocab = 64, 50_000
    logits = torch.randn(rows, vocab) * 4
    params = DrawParams(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5] * 16), top_k=torch.tensor([0, 1, 40, vocab + 5] * 16, dtype=torch.int32).roll(3),
        top_p=torch.tensor([1.0, 0.9, 0.3, 1.0] * 16).roll(1), min_p=torch.tensor([0.0, 0.0, 0.1, 0.02] * 16).roll(2),
        seeds=torch.randint(-(2**62), 2**62, (rows,)), counters=torch.arange(rows, dtype=torch.int32), all_greedy=False,
    )  # fmt: skip
    expected = sampling_reference.sample(logits, params)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    moved = DrawParams(**{name: getattr(params, name).cuda() for name in names}, all_greedy=False)
    result = ops.sample(logits.cuda(), moved).cpu()
    # float32 and float64 sums differ, so a draw near the edge between two tokens may give either.
    assert (result == expected).float().mean() > 0.95
    assert bool((result == expected)[params.temperature == 0].all())
