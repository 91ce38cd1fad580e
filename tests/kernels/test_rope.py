"""Rotation and the cache write in the interpreter: rotation against complex numbers in float64, the cache slot by slot."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.core.forward_batch import KVCache
from stoker.kernels.reference import rope as reference
from stoker.kernels.triton import rope as kernels
from stoker.kernels.types import HeadNorms, Rotary
from stoker.runtime.worker.aot_trace import EAGER_TOKENS

POSITIONS = 40


def table(dim: int, positions: int = POSITIONS) -> Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def expected_rotation(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Each pair of features as a complex number, times cos + i sin."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(*cos_sin.double()[positions.long()].chunk(2, -1))[:, None]
    x = x.double().clone()
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    turned = torch.complex(x[..., pairs[0]], x[..., pairs[1]]) * turn
    x[..., pairs[0]], x[..., pairs[1]] = turned.real, turned.imag
    return x


def expected_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of each head in float64, rounded to the dtype of x."""
    wide = x.double()
    wide = wide / (wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return (wide if weight is None else wide * weight.double()).to(x.dtype)


def fused(tokens: int, heads: int, kv_heads: int, size: int, value_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one projection, with a gap of NaN before each."""
    widths = (heads * size, kv_heads * size, kv_heads * value_size)
    row = torch.full((tokens, sum(widths) + 24), float("nan"), dtype=dtype)
    views, start = [], 8
    for width, last in zip(widths, (size, size, value_size), strict=True):
        view = row[:, start : start + width].view(tokens, width // last, last)
        view[:] = torch.randn(view.shape).to(dtype)
        views.append(view)
        start += width + 8
    return views[0], views[1], views[2]


def pages(kv_heads: int, block_size: int, size: int, dtype: torch.dtype) -> Tensor:
    if dtype in (torch.int8, torch.float8_e4m3fn):
        return torch.full((7, kv_heads, block_size, size), 99, dtype=torch.int8).view(dtype)
    return torch.full((7, kv_heads, block_size, size), 99.0, dtype=dtype)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """[T, kv_heads, D] at each slot."""
    return torch.stack([cache[int(s) // cache.shape[2], :, int(s) % cache.shape[2]] for s in slots])


def untouched(cache: Tensor, slots: Tensor) -> Tensor:
    """The values of all slots that are not in `slots`."""
    is_untouched = torch.ones(cache.shape[0], cache.shape[2], dtype=torch.bool)
    written = slots[slots >= 0].long()
    is_untouched[written // cache.shape[2], written % cache.shape[2]] = False
    return cache.transpose(1, 2)[is_untouched]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size", "dim", "block_size"),
    [(4, 2, 64, 64, 64, 16), (8, 8, 80, 80, 32, 32), (5, 1, 128, 128, 128, 64), (6, 3, 96, 48, 72, 16), (9, 9, 20, 24, 0, 16)],
)
def test_rotates_and_stores(
    heads: int, kv_heads: int, size: int, value_size: int, dim: int, block_size: int, dtype: torch.dtype, interleaved: bool
) -> None:
    q, k, v = fused(6, heads, kv_heads, size, value_size, dtype)
    before = q.clone(), k.clone(), v.clone()
    positions = torch.tensor([0, 39, 3, 7, 21, 0], dtype=torch.int32)
    slots = torch.tensor([5, 6 * block_size + 3, -1, 2 * block_size, 17, -1], dtype=torch.int32)
    cos_sin = table(dim) if dim else None
    cache = KVCache(pages(kv_heads, block_size, size, dtype), pages(kv_heads, block_size, value_size, dtype))
    out = kernels.rope_store(q, k, v, Rotary(positions, cos_sin, interleaved), cache, slots)
    want_q, want_k = (expected_rotation(x, positions, cos_sin, interleaved) if dim else x.double() for x in before[:2])
    stored = slots >= 0
    assert relative_error(out, want_q) < TOLERANCE[dtype]
    assert relative_error(read_slots(cache.keys, slots[stored]), want_k[stored]) < TOLERANCE[dtype]
    assert torch.equal(read_slots(cache.values, slots[stored]), before[2][stored])
    assert torch.equal(v, before[2])
    for part in (cache.keys, cache.values):
        assert (untouched(part, slots) == 99).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotates_heads_alone(dtype: torch.dtype, interleaved: bool) -> None:
    """Heads of a view with other features after them, which are not touched."""
    row = torch.randn(3, 7 * 20 + 6).to(dtype)
    x, before, positions = row[:, :140].view(3, 7, 20), row.clone(), torch.tensor([0, 39, 7], dtype=torch.int32)
    want = expected_rotation(x, positions, table(12), interleaved)
    assert relative_error(reference.rotate_heads(x, positions, table(12), interleaved), want) < TOLERANCE[dtype]
    assert relative_error(kernels.rotate_heads(x, positions, table(12), interleaved), want) < TOLERANCE[dtype]
    assert torch.equal(row[:, 140:], before[:, 140:])


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantizes_with_a_scale_per_head(dtype: torch.dtype, tokens: int) -> None:
    q, k, v = fused(tokens, 4, 2, 64, 64, torch.bfloat16)
    k *= 30  # some values are outside the range and are clamped
    key_scale, value_scale = torch.tensor([0.013, 0.4]), torch.tensor([0.01, 0.02])
    cache = KVCache(pages(2, 16, 64, dtype), pages(2, 16, 64, dtype), key_scale, value_scale)
    slots = torch.randperm(7 * 16)[:tokens].int()
    kernels.rope_store(q, k, v, Rotary(torch.zeros(tokens, dtype=torch.int32), None, False), cache, slots)
    limit = 127.0 if dtype == torch.int8 else 448.0
    for stored, x, scale in ((cache.keys, k, key_scale), (cache.values, v, value_scale)):
        units = (x.float() / scale[:, None]).clamp(-limit, limit)
        want = units.round().to(torch.int8) if dtype == torch.int8 else units.to(dtype)
        assert torch.equal(read_slots(stored, slots).view(torch.int8), want.view(torch.int8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantizes_ties_to_even_and_clamps_all_magnitudes(dtype: torch.dtype) -> None:
    scale = torch.tensor([0.25])
    # Of int8, units of 24.5 to 28 are ties; of e4m3, odd units from 17 on are, whose step is 2.
    units = [24.5, 25.5, -26.5, 17, 19, -21, 27, 447, 449, -127.5, 0, 1e-30, 1e30, -1e30, float("inf"), -float("inf")]
    v = (torch.tensor(units) * scale).view(1, 1, 16)
    cache = KVCache(pages(1, 16, 16, dtype), pages(1, 16, 16, dtype), scale, scale)
    zero = torch.zeros(1, dtype=torch.int32)
    kernels.rope_store(torch.zeros(1, 1, 16), v.clone(), v, Rotary(zero, None, False), cache, zero)
    limit = 127.0 if dtype == torch.int8 else 448.0
    clamped = torch.tensor(units).clamp(-limit, limit)
    want = clamped.round().to(torch.int8) if dtype == torch.int8 else clamped.to(dtype)
    for stored in (cache.keys, cache.values):
        assert torch.equal(read_slots(stored, zero)[0, 0].view(torch.int8), want.view(torch.int8))


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dim"), [(8, 2, 128, 128), (4, 4, 80, 32), (6, 3, 96, 96), (5, 1, 20, 10), (9, 9, 24, 0)]
)
def test_normalizes_heads_before_it_rotates_them(
    module: ModuleType, heads: int, kv_heads: int, size: int, dim: int, dtype: torch.dtype, interleaved: bool,
    weight_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    q, k, v = fused(6, heads, kv_heads, size, size, dtype)
    q *= torch.tensor([1e-3, 1, 30, 0, 1, 2])[:, None, None].to(dtype)  # eps matters, does not matter, and is all there is
    before = q.clone(), k.clone(), v.clone()
    weights = [None if weight_dtype is None else (torch.rand(size) * 4 - 1).to(weight_dtype) for _ in range(2)]
    positions = torch.tensor([0, 39, 3, 7, 21, 0], dtype=torch.int32)
    slots = torch.tensor([5, 99, -1, 32, 17, -1], dtype=torch.int32)
    cos_sin = table(dim) if dim else None
    cache = KVCache(*(pages(kv_heads, 16, size, dtype) for _ in range(2)))
    out = module.rope_store(q, k, v, Rotary(positions, cos_sin, interleaved, HeadNorms(*weights, 1e-5)), cache, slots)
    normed = [expected_norm(x, weight, 1e-5) for x, weight in zip(before[:2], weights, strict=True)]
    want = [expected_rotation(x, positions, cos_sin, interleaved) if dim else x.double() for x in normed]
    stored = slots >= 0
    for row in range(6):
        assert relative_error(out[row], want[0][row]) < TOLERANCE[dtype] if row != 3 else not out[row].any()
    assert relative_error(read_slots(cache.keys, slots[stored]), want[1][stored]) < TOLERANCE[dtype]
    assert torch.equal(read_slots(cache.values, slots[stored]), before[2][stored])
    assert torch.equal(k, before[1]) and torch.equal(v, before[2])
    for part in (cache.keys, cache.values):
        assert (untouched(part, slots) == 99).all()


# From 64 tokens on, a CTA has more heads where none are transformed.
@pytest.mark.parametrize(("balanced", "less_mean", "tokens"), [(False, False, 3), (False, False, 70), (True, False, 3), (True, True, 3)])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("size", "dim"), [(128, 128), (64, 32), (32, 0)])
def test_norms_before_an_8_bit_cache(
    size: int, dim: int, balanced: bool, less_mean: bool, cache_dtype: torch.dtype, tokens: int
) -> None:  # fmt: skip
    """One launch stores the same as a norm of its own and a launch without norms."""
    q, k, v = fused(tokens, 6, 2, size, size, torch.bfloat16)
    weights = [torch.rand(size) * 4 - 1 for _ in range(2)]
    scale = torch.tensor([0.03, 0.05])
    balance = torch.rand(2, 2, size) + 0.5 if balanced else None
    means = torch.randn(2, 1, size) * 9 if less_mean else None
    caches = [KVCache(*(pages(2, 16, size, cache_dtype) for _ in range(2)), scale, scale, balance, means) for _ in range(2)]
    slots, positions = torch.randperm(7 * 16)[:tokens].int(), torch.randint(0, POSITIONS, (tokens,), dtype=torch.int32)
    cos_sin = table(dim) if dim else None
    normed = [expected_norm(x, weight, 1e-6) for x, weight in zip((q, k), weights, strict=True)]
    want = kernels.rope_store(*normed, v, Rotary(positions, cos_sin, False), caches[0], slots)
    out = kernels.rope_store(q, k, v, Rotary(positions, cos_sin, False, HeadNorms(*weights, 1e-6)), caches[1], slots)
    assert relative_error(out, want) < TOLERANCE[torch.bfloat16]
    for pair in zip(*((cache.keys, cache.values) for cache in caches), strict=True):
        expected, found = (read_slots(part, slots).float() for part in pair)
        # Another order of summation may round a normed feature to the next bfloat16, and that one to the next stored value.
        assert (found != expected).float().mean() < 0.01
        assert ((found - expected).abs() <= 1 + expected.abs() / 8).all()


def transform_matrix(size: int, dim: int, interleaved: bool) -> Tensor:
    """float64 [size, size]: the matrix of `reference.rope.hadamard_transform`, whose signs follow from the common bits of two indices."""
    matrix = torch.zeros(size, size, dtype=torch.float64)

    def fill(count: int, place: Callable[[int, int], int], halves: int) -> None:
        block = max(count & -count, 1)
        for i, j, a, b in itertools.product(range(count), range(count), range(halves), range(halves)):
            if i // block == j // block:
                common = ((i % block) & (j % block)).bit_count() + (a & b)
                matrix[place(i, a), place(j, b)] = (-1) ** common / (block * halves) ** 0.5

    fill(dim // 2, lambda i, a: 2 * i + a if interleaved else a * dim // 2 + i, 2)
    fill(size - dim, lambda i, _: dim + i, 1)
    return matrix


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dim"),
    [(4, 2, 64, 64), (8, 8, 80, 32), (5, 1, 128, 128), (6, 3, 96, 72), (9, 9, 20, 0), (2, 2, 256, 256)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
def test_balances_and_transforms_queries_and_keys(
    module: ModuleType, heads: int, kv_heads: int, size: int, dim: int, interleaved: bool, cache_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, v = fused(6, heads, kv_heads, size, size, torch.float32)
    before = q.clone(), k.clone()
    positions = torch.tensor([0, 39, 3, 7, 21, 0], dtype=torch.int32)
    slots = torch.tensor([5, 99, -1, 32, 17, -1], dtype=torch.int32)
    balance, scale = torch.rand(kv_heads, 2, size) + 0.5, torch.rand(kv_heads) / 100 + 0.02
    cache = KVCache(pages(kv_heads, 16, size, cache_dtype), pages(kv_heads, 16, size, cache_dtype), scale, scale, balance)
    cos_sin = table(dim) if dim else None
    out = module.rope_store(q, k, v, Rotary(positions, cos_sin, interleaved), cache, slots)
    queries, keys = (expected_rotation(x, positions, cos_sin, interleaved) if dim else x.double() for x in before)
    matrix = transform_matrix(size, dim, interleaved)
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    of_keys, of_queries = balance.double().unbind(1)
    assert relative_error(out, (queries * of_queries.repeat_interleave(heads // kv_heads, 0)) @ matrix) < TOLERANCE[torch.float32]
    stored = slots >= 0
    want = ((keys * of_keys) @ matrix)[stored] / scale[:, None]
    limit = 127.0 if cache_dtype == torch.int8 else 448.0
    error = (read_slots(cache.keys, slots[stored]).double() - want.clamp(-limit, limit)).abs()
    # int8: half a step. e4m3: half of the last fraction bit (1 / 16 of the value), and half of the smallest subnormal.
    assert (error <= (0.5001 if cache_dtype == torch.int8 else want.abs() / 15.99 + 2**-10)).all()
    for part in (cache.keys, cache.values):
        assert (untouched(part.view(torch.int8), slots) == 99).all()


@pytest.mark.parametrize(("size", "dim"), [(64, 64), (80, 32), (96, 72), (20, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
def test_subtracts_the_mean_of_the_position_from_all_keys_but_the_first(
    module: ModuleType, size: int, dim: int, interleaved: bool
) -> None:  # fmt: skip
    q, k, v = fused(6, 4, 2, size, size, torch.float32)
    before = q.clone(), k.clone()
    positions = torch.tensor([0, 1023, 1024, 1, 2047, 2048], dtype=torch.int32)
    slots = torch.tensor([5, 99, -1, 32, 17, 18], dtype=torch.int32)
    balance, scale, means = torch.rand(2, 2, size) + 0.5, torch.tensor([0.25, 2.0]), torch.randn(2, 3, size) * 9
    cache = KVCache(*(pages(2, 16, size, torch.float8_e4m3fn) for _ in range(2)), scale, scale, balance, means)
    cos_sin = torch.randn(2049, dim) if dim else None
    out = module.rope_store(q, k, v, Rotary(positions, cos_sin, interleaved), cache, slots)
    queries, keys = (expected_rotation(x, positions, cos_sin, interleaved) if dim else x.double() for x in before)
    matrix, (of_keys, of_queries) = transform_matrix(size, dim, interleaved), balance.double().unbind(1)
    assert relative_error(out, (queries * of_queries.repeat_interleave(2, 0)) @ matrix) < TOLERANCE[torch.float32]
    missing = means.double()[:, positions // 1024].transpose(0, 1) * (positions > 0)[:, None, None]
    stored = slots >= 0
    want = (((keys * of_keys) @ matrix) / scale[:, None] - missing)[stored]
    error = (read_slots(cache.keys, slots[stored]).double() - want).abs()
    assert (error <= want.abs() / 15.99 + 2**-10).all()


# 9 and 3 heads and 13 tokens are no multiples of those of a tile or a CTA.
TILES = [
    kernels.Tile(4, 1, 1, 1, True, None),
    kernels.Tile(8, 1, 4, 2, False, None),
    kernels.Tile(8, 2, 2, 4, False, 64),
    kernels.Tile(4, 4, 1, 4, False, 64),
    kernels.Tile(2, 8, 4, 4, False, 64),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("transformed", "normed"), [(False, False), (False, True), (True, False), (True, True)])
def test_every_tile_computes_the_same(tile: kernels.Tile, transformed: bool, normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    q, k, v = fused(13, 9, 3, 32, 32, torch.float32)
    before = q.clone(), k.clone()
    positions, cos_sin = torch.randint(0, 2049, (13,), dtype=torch.int32), torch.randn(2049, 16)
    positions[4] = 0
    slots = torch.randperm(7 * 16)[:13].int()
    slots[[3, 12]] = -1
    weights, scale = [torch.rand(32) + 0.5 for _ in range(2)], torch.tensor([0.25, 2.0, 0.5])
    balance, means = (torch.rand(3, 2, 32) + 0.5, torch.randn(3, 3, 32) * 9) if transformed else (None, None)
    cache = KVCache(*(pages(3, 16, 32, torch.float8_e4m3fn) for _ in range(2)), scale, scale, balance, means)
    monkeypatch.setattr(kernels, "_tile", lambda *shape: tile)
    out = kernels.rope_store(q, k, v, Rotary(positions, cos_sin, False, HeadNorms(*weights, 1e-6) if normed else None), cache, slots)
    if normed:
        before = tuple(expected_norm(x, weight, 1e-6) for x, weight in zip(before, weights, strict=True))
    queries, keys = (expected_rotation(x, positions, cos_sin, False) for x in before)
    missing = torch.zeros(13, 3, 32, dtype=torch.float64)
    if transformed:
        matrix, (of_keys, of_queries) = transform_matrix(32, 16, False), balance.double().unbind(1)
        queries, keys = (queries * of_queries.repeat_interleave(3, 0)) @ matrix, (keys * of_keys) @ matrix
        missing = means.double()[:, positions // 1024].transpose(0, 1) * (positions > 0)[:, None, None]
    assert relative_error(out, queries) < TOLERANCE[torch.float32]
    stored = slots >= 0
    for part, x in ((cache.keys, keys / scale[:, None] - missing), (cache.values, v.double() / scale[:, None])):
        want = x[stored].clamp(-448, 448)
        assert ((read_slots(part, slots[stored]).double() - want).abs() <= want.abs() / 15.99 + 2**-10).all()
        assert (untouched(part.view(torch.int8), slots) == 99).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 4), (16, 4), (64, 8), (28, 4), (32, 32), (9, 3), (8, 1)])
@pytest.mark.parametrize("size", [64, 96, 128, 256, 576])
def test_tiles_by_rule(size: int, heads: int, kv_heads: int, transformed: bool, normed: bool) -> None:
    counts, traced = (*range(1, 2000), *range(2000, 8193, 8)), {1, 3, *EAGER_TOKENS, 8191, 8192}
    tiles = {tokens: kernels._tile(tokens, heads, kv_heads, size, transformed, normed) for tokens in counts}
    assert set(tiles.values()) == {tile for tokens, tile in tiles.items() if tokens in traced}  # no step compiles another kernel
    for tile in tiles.values():
        rows = tile.heads * tile.tokens
        assert rows.bit_count() == 1
        assert not tile.early or tile.tokens * tile.steps == 1  # the wait is in the loop over tokens
    last = tiles[8192]
    if transformed and (heads, kv_heads, size) == (32, 8, 128):
        assert 8192 // (last.tokens * last.steps) * 6 < 10_000  # an H200 starts 10,000 CTAs in 12 µs


def test_a_mean_without_a_balance_is_refused() -> None:
    q, k, v = fused(1, 4, 2, 64, 64, torch.float32)
    cache = KVCache(*(pages(2, 16, 64, torch.float8_e4m3fn) for _ in range(2)), torch.ones(2), torch.ones(2), key_mean=torch.ones(2, 1, 64))
    with pytest.raises(ValueError, match="key_balance"):
        kernels.rope_store(q, k, v, Rotary(torch.ones(1, dtype=torch.int32), None, False), cache, torch.zeros(1, dtype=torch.int32))


def test_latent_cache_has_no_values() -> None:
    q, k, _ = fused(3, 4, 1, 576, 16, torch.float32)
    positions, slots = torch.tensor([1, 2, 3]), torch.tensor([3, 20, -1])
    before = k.clone()
    cache = KVCache(pages(1, 16, 576, torch.float32), None)
    kernels.rope_store(q, k, k[..., :512], Rotary(positions, table(64), True), cache, slots)
    want = expected_rotation(before, positions, table(64), True)[:2]
    assert relative_error(read_slots(cache.keys, slots[:2]), want) < 1e-6


def test_nothing_to_do() -> None:
    q, k, v = fused(0, 4, 2, 64, 64, torch.float32)
    cache = KVCache(pages(2, 16, 64, torch.float32), pages(2, 16, 64, torch.float32))
    nothing = torch.zeros(0, dtype=torch.int32)
    assert kernels.rope_store(q, k, v, Rotary(nothing, table(64), False), cache, nothing).shape == (0, 4, 64)
