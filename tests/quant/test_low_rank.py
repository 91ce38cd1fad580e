"""Low-rank adapters of stub deltas on linears of every weight format, of shards, and in a whole model."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quant_formats import CASES, made, real_weight
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.core.specs import LinearSpec
from stoker.distributed.group import Group
from stoker.kernels import ops
from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.decoder import Decoder, declare
from stoker.layers.loader import Loader
from stoker.layers.low_rank import Adapters, LowRankDelta, LowRankLinear, shard_delta
from stoker.layers.shard import Sharding, column_slices, row_slices
from stoker.quant.format import TensorTable
from stoker.quant.linear_ops import PackedLinear
from stoker.quant.recipe import Recipe

NUM_ADAPTERS = 3
FUSIONS = {
    "plain": PLAIN,
    "normed": Fusion("rms", torch.rand(128) + 0.5, None, 1e-5),
    "layer norm, residual": Fusion("layer", torch.rand(128) + 0.5, torch.randn(128), 1e-5),
    "gated": Fusion("rms", torch.rand(128) + 0.5, None, 1e-5, gate="silu"),
    "gated input": Fusion(input_gate="gelu"),
}


def delta_of(in_features: int, out_features: int, rank: int, seed: int = 0) -> LowRankDelta:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(NUM_ADAPTERS, rank, in_features, generator=generator) / in_features**0.5
    b = torch.randn(NUM_ADAPTERS, out_features, rank, generator=generator)
    return LowRankDelta(a, b, torch.rand(NUM_ADAPTERS, generator=generator) + 0.5)


def in_float64(delta: LowRankDelta, x: Tensor, ids: Tensor) -> Tensor:
    """scale × B A x, one row after another."""
    rows = []
    for row, adapter in zip(x.double(), ids.tolist(), strict=True):
        a, b, scale = (t[adapter].double() for t in (delta.a, delta.b, delta.scaling))
        rows.append(scale * (b @ (a @ row)) if adapter >= 0 else torch.zeros(delta.b.shape[1], dtype=torch.float64))
    return torch.stack(rows)


def wide(fusion: Fusion) -> Fusion:
    parts = {name: value.double() for name in ("norm_weight", "norm_bias", "residual") if (value := getattr(fusion, name)) is not None}
    return replace(fusion, **parts)


@pytest.mark.parametrize("case", CASES)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(-1, NUM_ADAPTERS - 1)), min_size=1, max_size=6),
    rank=st.integers(1, 9),
    fused=st.sampled_from(list(FUSIONS)),
    has_bias=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_rows_have_the_delta_of_their_adapter(case: str, rows: list[tuple[int, int]], rank: int, fused: str, has_bias: bool) -> None:
    """Against W x + scale × B A x in float64, W as the format stores it. Rows without an adapter have the bits of the plain linear."""
    chosen, (spec, weight, stats) = CASES[case][0], made("even")
    stored = chosen.quantize(weight, spec, stats)
    real = real_weight(chosen, spec, stored).double()
    ids = torch.tensor([adapter for count, adapter in rows for _ in range(count)], dtype=torch.int32)
    bias = torch.randn(spec.out_features) if has_bias else None
    fusion = FUSIONS[fused]
    x = torch.randn(len(ids), spec.in_features * (2 if fusion.input_gate else 1))
    if "residual" in fused:
        fusion = replace(fusion, residual=torch.randn(len(ids), spec.out_features))
    delta = delta_of(spec.in_features, spec.out_features, rank)
    base, adapters = chosen.load(dict(stored), bias), Adapters({spec.name: delta})
    linear = adapters.adapt(base, spec, Sharding(), 0)
    assert isinstance(linear, LowRankLinear) and isinstance(base, PackedLinear)
    plain = base(x, fusion)
    assert torch.equal(linear(x, fusion), plain)  # a step without adapters
    adapters.ids = ids
    found = linear(x, fusion)
    assert torch.equal(found[ids < 0], plain[ids < 0])

    def exact(adapter_ids: Tensor) -> Tensor:
        def product(h: Tensor) -> Tensor:
            return h @ real.t() + (0 if bias is None else bias.double()) + in_float64(delta, h, adapter_ids)

        return around(x.double(), wide(fusion), product)

    # Rounded activations cost rows with a delta as much as they cost rows without one.
    bound = 5 * relative_error(plain, exact(torch.full_like(ids, -1))) + 1e-4
    assert relative_error(found, exact(ids)) < bound


def relative_error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("split", "parts"), [("column", (48, 48)), ("row", (96,)), ("heads", (64, 16, 16)), ("row_heads", (96,))])
def test_shards_of_a_delta_make_the_whole(split: str, parts: tuple[int, ...]) -> None:
    options = {"head_size": 16, "num_kv_heads": 4 if split == "row_heads" else 0}
    spec = LinearSpec(name="layers.0.attention.x", in_features=128, parts=parts, split=split, **options)  # type: ignore[arg-type]
    delta, x, ids = delta_of(128, sum(parts), 4), torch.randn(6, 128), torch.tensor([0, 1, 2, -1, 2, 0], dtype=torch.int32)
    want, sharding = delta(x, ids), Sharding(size=2)
    found = torch.zeros_like(want)
    for rank in range(2):
        columns = [i for start, count in column_slices(spec, sharding, rank) for i in range(start, start + count)]
        rows = [i for start, count in row_slices(spec, sharding, rank) for i in range(start, start + count)]
        own = shard_delta(delta, spec, sharding, rank)(x[:, columns], ids)
        found[:, rows] = found[:, rows] + own if split.startswith("row") else own
    torch.testing.assert_close(found, want)


def test_unsupported_linears_and_shapes_are_rejected() -> None:
    adapters = Adapters({"layers.0.mlp.up": delta_of(64, 96, 2), "head": delta_of(128, 96, 2)})
    spec, weight, _ = made("even")
    linear = CASES["dense"][0].load({"weight": weight}, None)
    with pytest.raises(ConfigError, match=r"A \[3, 2, 64\].*must be \[adapters, rank, 128\]"):
        adapters.adapt(linear, spec, Sharding(), 0)
    with pytest.raises(ConfigError, match="outside the layers"):
        adapters.adapt(linear, msgspec.structs.replace(spec, name="head"), Sharding(), 0)
    spec, weight, _ = made("experts")
    with pytest.raises(ConfigError, match="stacked experts"):
        adapters.adapt(CASES["dense"][0].load({"weight": weight}, None), spec, Sharding(), 0)


NORM = NormConfig()
MODEL = ModelConfig(
    architecture="Stub", vocab_size=64, hidden_size=32, max_positions=64, norm=NORM, tie_head=True,
    layers=(LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_size=16), mlp=MLPConfig(size=48), norm=NORM),) * 2,
)  # fmt: skip


def model(adapters: Adapters | None) -> Decoder:
    generator = torch.Generator().manual_seed(1)
    shapes = {}
    for spec in declare(MODEL).values():
        name, shape = (f"{spec.name}.weight", spec.weight_shape) if isinstance(spec, LinearSpec) else (spec.name, spec.shape)
        shapes[name] = shape
    table = TensorTable({name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()})
    return Decoder(MODEL, Loader(table, Recipe(), torch.float32, torch.device("cpu"), Group(), adapters=adapters), 64)


def step(decoder: Decoder, adapter_ids: list[int] | None) -> Tensor:
    """Logits of three rows with one token each."""
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    batch = ForwardBatch(
        ints(3, 5, 7), ints(0, 0, 0), ints(0, 4, 8), ints(0, 1, 2, 3), ints(1, 1, 1), ints(0, 1, 2)[:, None], 3, 1, 1,
        adapter_ids=None if adapter_ids is None else ints(*adapter_ids),
    )  # fmt: skip
    caches = [KVCache(torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16)) for _ in MODEL.layers]
    return decoder(batch, caches)


def test_a_model_runs_rows_of_several_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the logits of a step in which all rows have its adapter; fused layers are used in steps without adapters only."""
    specs = [spec for spec in declare(MODEL).values() if isinstance(spec, LinearSpec) and spec.name.startswith("layers.")]
    adapters = Adapters({spec.name: delta_of(spec.in_features, spec.out_features, 2, seed) for seed, spec in enumerate(specs)})
    fused: list[object] = []
    real = ops.fused_layer
    monkeypatch.setattr(ops, "fused_layer", lambda *args: fused.append(args) or real(*args))
    monkeypatch.setattr(ops, "supports_fused_layer", lambda layer, rows: True)
    decoder, plain = model(adapters), model(None)
    without = step(plain, None)
    assert len(fused) == 2 and torch.equal(step(decoder, None), without) and len(fused) == 4
    mixed = step(decoder, [1, -1, 0])
    assert len(fused) == 4
    for row, adapter in enumerate((1, -1, 0)):
        torch.testing.assert_close(mixed[row], step(decoder, [adapter] * 3)[row])
    torch.testing.assert_close(mixed[1], without[1])
    assert not torch.allclose(mixed[0], without[0]) and not torch.allclose(mixed[2], without[2])
    with pytest.raises(ValueError, match="loaded without adapters"):
        step(plain, [0, 0, 0])


def test_layers_of_a_model_load_with_their_deltas() -> None:
    adapters = Adapters({"layers.1.mlp.down": delta_of(48, 32, 2)})
    decoder = model(adapters)
    kinds = [type(layer.mlp.down) for layer in decoder.layers]
    assert kinds == [PackedLinear, LowRankLinear]
