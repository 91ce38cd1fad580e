"""Key spreading: without rounding it does not change attention, and with rounding it reduces the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, RopeConfig
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.kernels import ops
from stoker.kernels.reference import rope as rope_reference
from stoker.kernels.reference.rope import hadamard_transform, quantize
from stoker.kernels.types import AttentionParams, Rotary
from stoker.layers.attention import alibi_slopes
from stoker.layers.rope import rope_table
from stoker.quant import key_spreading
from stoker.quant.calibration.cache_stats import cache_scale
from stoker.quant.key_spreading import KeyStats, has_mean, stored_means

KINDS = ("int8", "float8_e4m3fn")
TOKENS = 30


def attention(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**({"num_heads": 6, "num_kv_heads": 2, "head_size": 24} | changes))


def one_row_batch(length: int) -> ForwardBatch:
    positions = torch.arange(length, dtype=torch.int32)
    bounds, lens = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    return ForwardBatch(positions, positions, positions, bounds, lens, torch.zeros(1, 1, dtype=torch.int32), 0, length, length)


ROPES = {
    "none": None,
    "halves": RopeConfig(dim=24),
    "interleaved": RopeConfig(dim=24, interleaved=True),
    "first features only": RopeConfig(dim=8),
    "first features only, interleaved": RopeConfig(dim=12, interleaved=True),
}
PARAMS = {
    "plain": ({}, {}),
    "sinks": ({"sinks": True}, {"sinks": torch.linspace(-1, 1, 6)}),
    "softcap": ({"softcap": 3.0}, {"softcap": 3.0}),
    "alibi": ({"alibi": True}, {"alibi_slopes": alibi_slopes(6)}),
    "window": ({"window": 7}, {"window": 7}),
}


@pytest.mark.parametrize("less_mean", [False, True])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(("changes", "features"), PARAMS.values(), ids=PARAMS)
def test_attention_over_unrounded_keys_does_not_change(
    rope: RopeConfig | None, changes: dict, features: dict, less_mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 cache with scales of 1 rounds nothing, so only the transformation and the means could change scores."""
    for module in (key_spreading, rope_reference):
        monkeypatch.setattr(module, "MEAN_TOKENS", 8)
    torch.manual_seed(0)
    config, batch = attention(rope=rope, **changes), one_row_batch(TOKENS)
    table = None if rope is None else rope_table(rope, TOKENS, "cpu")
    interleaved = rope is not None and rope.interleaved
    params = AttentionParams(scale=24**-0.5, **features)
    q, k, v = torch.randn(TOKENS, 6, 24), torch.randn(TOKENS, 2, 24) + 5 * torch.randn(2, 24), torch.randn(TOKENS, 2, 24)

    def run(cache: KVCache) -> tuple[Tensor, Tensor]:
        queries = ops.rope_store(q.clone(), k, v, Rotary(batch.positions, table, interleaved), cache, batch.slots)
        return queries, ops.attention(queries, cache, batch, params)

    pages = [torch.zeros(1, 2, TOKENS, 24) for _ in range(4)]
    plain = KVCache(*pages[:2])
    queries, expected = run(plain)
    stats = KeyStats(config, table, less_mean)
    stats.add(queries, plain.keys[0].transpose(0, 1))
    ones, means = torch.ones(2), None
    if less_mean:
        assert torch.allclose(stats.mean(), k.mean(0), atol=1e-4)
        measured = {"key_scale": ones, "key_balance": stats.balance(), "key_mean": stats.mean()}
        means = stored_means(measured, config, table, TOKENS)
        assert means.shape == (2, 4, 24)
    found = run(KVCache(*pages[2:], ones, ones, stats.balance(), means))
    assert not torch.allclose(found[0], queries, atol=0.1), "queries are transformed"
    torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(
        stats.largest(), pages[2].abs().amax((0, 2, 3)), rtol=1e-2 if less_mean else 1e-5
    )  # means are rounded to bfloat16


def heads(seed: int) -> tuple[Tensor, Tensor]:
    """queries [T, 4, 16] and keys [T, 2, 16] with a large mean of a few features, as in language models."""
    torch.manual_seed(seed)
    mean = torch.zeros(16)
    mean[torch.tensor([0, 3, 8, 11])] = torch.tensor([13.0, -9.0, 4.0, -7.0])
    return torch.randn(400, 4, 16) + mean / 3, torch.randn(400, 2, 16) * 1.5 + mean


def stored(keys: Tensor, scale: Tensor, kv_cache: str) -> Tensor:
    return quantize(keys / scale[:, None], getattr(torch, kv_cache)).double() * scale[:, None]


@pytest.mark.parametrize("kv_cache", KINDS)
@pytest.mark.parametrize("rope", [None, RopeConfig(dim=16), RopeConfig(dim=8, interleaved=True)])
def test_rounding_errors_decrease_on_keys_that_were_not_measured(rope: RopeConfig | None, kv_cache: str) -> None:
    """The error is the variance over keys of what rounding adds to scores, in float64."""
    stats = KeyStats(attention(num_heads=4, head_size=16, rope=rope))
    for seed in range(6):  # more windows than the balance is computed from
        stats.add(*heads(seed))
    (queries, keys), rotation = heads(9), (0 if rope is None else rope.dim, rope is not None and rope.interleaved)
    key_factors, query_factors = stats.balance().unbind(1)
    spread_keys = hadamard_transform(keys * key_factors, *rotation)
    spread_queries = hadamard_transform(queries * query_factors.repeat_interleave(2, 0), *rotation)
    assert torch.allclose(
        torch.einsum("qgd,kgd->gqk", spread_queries[:, ::2], spread_keys), torch.einsum("qgd,kgd->gqk", queries[:, ::2], keys), atol=1e-2
    )

    def error(keys: Tensor, scale: Tensor, queries: Tensor) -> float:
        difference = stored(keys, scale, kv_cache) - keys
        return float(torch.einsum("qghd,kgd->ghqk", queries.double().unflatten(1, (2, 2)), difference).var(-1).mean())

    plain = cache_scale(keys.abs().amax((0, 2)), kv_cache)
    assert error(spread_keys, cache_scale(stats.largest(), kv_cache), spread_queries) < 0.9 * error(keys, plain, queries)


@pytest.mark.parametrize("rope", [None, RopeConfig(dim=16, theta=1e9), RopeConfig(dim=8, interleaved=True)])
def test_subtracting_the_mean_reduces_the_error_at_any_position(rope: RopeConfig | None) -> None:
    """The error is the variance of what e4m3 adds to scores, at positions that were not measured.

    Features that rotate fast have no mean. With theta=1e9 half of them do.
    """
    config = attention(num_heads=4, head_size=16, rope=rope)
    table = None if rope is None else rope_table(rope, 4096, "cpu")

    def window(seed: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        pair = heads(seed)
        rows = None if table is None else table[positions, None].chunk(2, dim=-1)
        return pair if rows is None or rope is None else tuple(rope_reference.rotate(x, *rows, rope.interleaved) for x in pair)

    errors, rotation = [], (0 if rope is None else rope.dim, rope is not None and rope.interleaved)
    for less_mean in (False, True):
        stats = KeyStats(config, table, less_mean)
        for seed in range(6):
            stats.add(*window(seed, torch.arange(400)))
        tensors = {"key_scale": cache_scale(stats.largest(), "float8_e4m3fn"), "key_balance": stats.balance()}
        key_factors, query_factors = tensors["key_balance"].unbind(1)
        positions = torch.arange(2900, 3300)
        queries, keys = window(9, positions)
        spread_queries = hadamard_transform(queries * query_factors.repeat_interleave(2, 0), *rotation)
        spread_keys = hadamard_transform(keys * key_factors, *rotation)
        if less_mean:
            means = stored_means(tensors | {"key_mean": stats.mean()}, config, table, 4096)[:, positions // 1024].transpose(0, 1)
            spread_keys = spread_keys - means * tensors["key_scale"][:, None]
        difference = stored(spread_keys, tensors["key_scale"], "float8_e4m3fn") - spread_keys
        errors.append(float(torch.einsum("qghd,kgd->ghqk", spread_queries.double().unflatten(1, (2, 2)), difference).var(-1).mean()))
    assert errors[1] < (0.5 if rope is None else 0.9) * errors[0]


def test_which_attention_has_a_mean() -> None:
    found = [size for size in (16, 64, 80, 96, 128, 192, 256) if has_mean(attention(head_size=size), "float8_e4m3fn")]
    assert found == [16, 64, 128]
    assert not has_mean(attention(head_size=64), "int8")
    assert not has_mean(attention(head_size=64, rope=RopeConfig(dim=24, two_axes=True)), "float8_e4m3fn")


def test_features_that_are_rotated_together_have_one_factor() -> None:
    def balance_of(rope: RopeConfig) -> Tensor:
        stats = KeyStats(attention(num_heads=4, head_size=16, rope=rope))
        stats.add(*heads(0))
        found = stats.balance()
        assert torch.allclose(found[:, 0] * found[:, 1], torch.ones(2, 16)) and found[:, 0].std() > 0.1
        return found

    halves, neighbours = balance_of(RopeConfig(dim=12)), balance_of(RopeConfig(dim=12, interleaved=True))
    assert torch.equal(halves[..., :6], halves[..., 6:12]) and torch.equal(neighbours[..., 0:12:2], neighbours[..., 1:12:2])
    assert not torch.equal(halves[..., 12], halves[..., 13]), "features that are not rotated have separate factors"


def test_features_without_queries_or_keys_have_finite_factors() -> None:
    stats = KeyStats(attention(num_heads=2, head_size=16))
    queries, keys = torch.zeros(4, 2, 16), torch.zeros(4, 2, 16)
    queries[..., :8], keys[..., 4:12] = 1.0, 1.0
    stats.add(queries, keys)
    assert stats.balance().isfinite().all() and (stats.balance() < 20).all()


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "gemma2", "gpt_oss", "phi", "bloom"])
@pytest.mark.parametrize("kv_cache", KINDS)
def test_builds_calibrate_the_cache_of_any_attention(model: str, kv_cache: str, tmp_path: Path) -> None:
    """The weights are those of the checkpoint, and the quantized cache changes the score of a text very little."""
    checkpoint = tiny.save(tiny.model(model), tmp_path / "hf")
    calibration: dict[str, Any] = {"calibration_size": 4, "calibration_seq_len": 64, "device": "cpu", "max_perplexity_increase": 1.0}
    plain = build(checkpoint, tmp_path / "plain", BuildConfig(device="cpu"), verify="files")
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(kv_cache_dtype=kv_cache, **calibration), verify="files")
    tokens = split_windows(list(range(1, 200)), 64)
    expected, found = (LayerwiseModel(each.config.model, tokens).run(each.loader()) for each in (plain, engine))
    assert found.nll != expected.nll and found.nll == pytest.approx(expected.nll, rel=1e-2)
    config = engine.config.model.layers[0].attention
    assert isinstance(config, AttentionConfig)
    balance = engine.source().get("layers.0.attention.key_balance", (config.num_kv_heads, 2, config.head_size), torch.float32)
    assert not torch.allclose(balance, torch.ones(()), atol=0.01)
    loader = engine.loader()
    loader.recipe = plain.config.recipe
    assert LayerwiseModel(engine.config.model, tokens).run(loader).nll == expected.nll, "the weights are the checkpoint's"
