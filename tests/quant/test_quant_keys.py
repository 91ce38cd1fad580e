"""Keys turned and scaled for an 8-bit cache: every score stays as it is, and its rounding errs less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.stream import LayerStream, windows
from stoker.layers.config import AttentionConfig, NormConfig, RopeConfig
from stoker.layers.rope import rope_table
from stoker.quant.keys import QueryKeys, pairs, search, turn

KINDS = ("int8", "float8_e4m3fn")


def attention(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**({"num_heads": 6, "num_kv_heads": 2, "head_size": 8} | changes))


def scores(qkv: Tensor, config: AttentionConfig) -> Tensor:
    """float64 [heads, T, T]: queries times keys of one window, features rotated one by one as arXiv 2104.09864 writes them."""
    heads = qkv.double().view(len(qkv), -1, config.head_size)[:, : config.num_heads + config.num_kv_heads].clone()
    if (rope := config.rope) is not None:
        for i in range(rope.dim // 2):
            a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + rope.dim // 2)
            angle = torch.arange(len(qkv), dtype=torch.float64)[:, None] * rope.theta ** (-2 * i / rope.dim)
            first, second = heads[..., a].clone(), heads[..., b].clone()
            heads[..., a] = first * angle.cos() - second * angle.sin()
            heads[..., b] = first * angle.sin() + second * angle.cos()
    queries, keys = heads.split((config.num_heads, config.num_kv_heads), dim=1)
    keys = keys.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
    return torch.einsum("qhd,khd->hqk", queries, keys)


ROPES = {
    "none": None,
    "halves": RopeConfig(dim=8),
    "interleaved": RopeConfig(dim=8, interleaved=True),
    "some of the features": RopeConfig(dim=4),
    "some, interleaved": RopeConfig(dim=4, interleaved=True),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_arbitrary_factors_leave_scores_as_they_are(rope: RopeConfig | None) -> None:
    torch.manual_seed(0)
    config = attention(rope=rope)
    weight, bias, x = torch.randn(80, 16).double(), torch.randn(80).double(), torch.randn(30, 16).double()
    before = x @ weight.t() + bias
    factors = torch.polar(torch.rand(2, 4) + 0.5, torch.randn(2, 4))
    turn(weight, config, factors)
    turn(bias, config, factors)
    after = x @ weight.t() + bias
    assert torch.allclose(scores(after, config), scores(before, config), rtol=1e-4, atol=1e-3)
    assert torch.equal(after[:, 64:], before[:, 64:]), "values stay"
    assert not torch.allclose(after[:, :64], before[:, :64], atol=0.1)


def test_attention_that_would_change_is_left_alone() -> None:
    changed = [attention(qk_norm=NormConfig()), attention(clip_qkv=8.0), attention(rope=RopeConfig(dim=8, two_axes=True))]
    assert all(pairs(config) is None for config in [*changed, attention(head_size=7)])


def heads(seed: int) -> tuple[Tensor, Tensor]:
    """Complex keys [T, pairs] and queries: slow pairs with a large mean and little else, as those of language models."""
    torch.manual_seed(seed)
    middle = torch.tensor([13 + 4j, 9 - 7j, 0, 0, 3j, 0, 0.5, 0])
    return torch.randn(400, 8, dtype=torch.complex64) * 1.5 + middle, torch.randn(400, 8, dtype=torch.complex64) + middle / 3


def error(keys: Tensor, queries: Tensor, factors: Tensor, kv_cache: str) -> float:
    """The variance over keys of what a cache with one scale adds to scores, in float64."""
    turned = torch.view_as_real((keys * factors).to(torch.complex128))
    most = turned.abs().max()
    stored = (turned / most * 127).round() * most / 127 if kv_cache == "int8" else turned.float().to(torch.float8_e4m3fn).double()
    wrong = torch.view_as_complex(stored) / factors - keys
    added = (queries.conj().to(torch.complex128) @ wrong.t()).real
    return float(added.var(1).mean())


@pytest.mark.parametrize("kv_cache", KINDS)
def test_rounded_keys_err_less_on_keys_that_the_search_did_not_see(kv_cache: str) -> None:
    factors = search(*heads(0), kv_cache)
    keys, queries = heads(1)
    assert error(keys, queries, factors, kv_cache) < 0.8 * error(keys, queries, torch.ones(8, dtype=torch.complex64), kv_cache)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_queries_and_keys_are_taken_as_attention_multiplies_them(rope: RopeConfig | None) -> None:
    config, qkv = attention(rope=rope), torch.randn(20, 80)
    found = QueryKeys(config, None if rope is None else rope_table(rope, 20, "cpu"))
    found.add(qkv)
    queries, keys = found._found[0].split((6, 2), dim=1)
    product = torch.einsum("qhp,khp->hqk", queries.conj(), keys.repeat_interleave(3, dim=1)).real
    assert torch.allclose(product.double(), scores(qkv, config), atol=1e-3)


@pytest.mark.parametrize("kv_cache", KINDS)
def test_a_build_turns_keys_and_stays_the_model_it_was(kv_cache: str, tmp_path: Path) -> None:
    """Without its cache's rounding, the engine is the checkpoint's; queries and keys are not."""
    checkpoint = tiny.save(tiny.model("qwen2"), tmp_path / "hf")
    quick: dict[str, Any] = {"calibration_size": 4, "calibration_seq_len": 64, "device": "cpu", "max_perplexity_increase": 1.0}
    plain = build(checkpoint, tmp_path / "plain", BuildConfig(device="cpu"), verify="files")
    turned = build(checkpoint, tmp_path / "turned", BuildConfig(kv_cache_dtype=kv_cache, **quick), verify="files")
    tokens, found = windows(list(range(1, 200)), 64), []
    for engine in (plain, turned):
        loader = engine.loader()
        loader.recipe = plain.config.recipe
        found.append(LayerStream(engine.config.model, tokens).run(loader).nll)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    name = "layers.0.attention.qkv.weight"
    before, after = (engine.source().get(name, (80, 48), torch.float32) for engine in (plain, turned))
    assert not torch.allclose(before[:64], after[:64], atol=1e-3) and torch.equal(before[64:], after[64:])
