"""Calibration: statistics of inputs, scale folding, scales of the cache, and calibrated formats compared with plain rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.recording import CheckpointTensorSource, dense_tensors
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.core.model_config import AttentionConfig, MLAConfig, NormConfig, RopeConfig
from stoker.core.specs import LinearSpec
from stoker.distributed.group import SINGLE
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.kernels.reference.rope import hadamard_transform
from stoker.layers.decoder import layer_specs
from stoker.layers.loader import Loader
from stoker.quant.calibration import scale_folding
from stoker.quant.calibration.cache_stats import CacheStats
from stoker.quant.calibration.error_compensation import ErrorCompensation
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import Format, TensorTable
from stoker.quant.formats.awq import AWQ
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.gptq import GPTQ
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.smoothquant import SmoothQuant
from stoker.quant.recipe import Recipe

CPU = torch.device("cpu")


def inputs(columns: int = 128, count: int = 600) -> Tensor:
    """Correlated inputs [count, columns], a few of them much larger than the others, as in language models."""
    torch.manual_seed(1)
    x = torch.randn(count, columns // 4) @ torch.randn(columns // 4, columns) * 0.3 + torch.randn(count, columns) * 0.3
    x[:, ::29] *= 20
    return x


def measured(x: Tensor) -> InputStats:
    stats = InputStats.zeros(x.shape[1], CPU)
    for rows in x.split(100):
        stats.add(rows)
    return stats


def output_error(chosen: Format, weight: Tensor, x: Tensor, stats: InputStats | None) -> float:
    """The relative error of the outputs, with the scale folding of the format if it has one."""
    spec = LinearSpec(name="x", in_features=weight.shape[1], parts=(weight.shape[0],))
    factors = None if stats is None else chosen.folding_factors(weight, spec, stats)
    if factors is None:
        factors = torch.ones(weight.shape[1])
    scaled = None if stats is None else stats.divided_by(factors)
    op = chosen.load(chosen.quantize(weight * factors, spec, scaled), None)
    exact = x @ weight.t()
    return float((op(x / factors) - exact).norm() / exact.norm())  # type: ignore[operator]


def test_statistics_are_sums_over_all_rows() -> None:
    x = inputs()
    stats = measured(x)
    assert torch.allclose(stats.gram, x.t() @ x, rtol=1e-4, atol=1e-2)
    assert torch.allclose(stats.mean_abs, x.abs().mean(0), rtol=1e-4)
    assert torch.equal(stats.amax, x.abs().amax(0)) and stats.count == 600
    factors = torch.rand(128) + 0.5
    divided, again = stats.divided_by(factors), measured(x / factors)
    assert torch.allclose(divided.gram, again.gram, rtol=1e-3, atol=1e-1) and torch.allclose(divided.amax, again.amax)


@pytest.mark.parametrize("columns", [128, 144])
def test_blocks_are_the_grams_of_groups(columns: int) -> None:
    stats = measured(inputs(columns))
    blocks = stats.blocks(64)
    assert blocks.shape == (-(-columns // 64), 64, 64)
    for group in range(blocks.shape[0]):
        part = stats.gram[group * 64 : group * 64 + 64, group * 64 : group * 64 + 64] / stats.count
        assert torch.allclose(blocks[group, : part.shape[0], : part.shape[1]], part)
        assert not blocks[group, part.shape[0] :].any()


@pytest.mark.parametrize("zero", ["none", "int"])
def test_awq_and_gptq_have_less_error_than_rounding(zero: Any) -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    plain = output_error(Int4(group_size=128, zero=zero, clip=False), weight, x, None)
    assert output_error(AWQ(group_size=128, zero=zero), weight, x, stats) < 0.6 * plain
    assert output_error(GPTQ(group_size=128, zero=zero), weight, x, stats) < 0.5 * plain
    assert output_error(GPTQ(group_size=128, zero=zero, act_order=False), weight, x, stats) < 0.6 * plain


def test_error_compensation_of_fp8_reduces_the_error() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    plain = output_error(Fp8(activations="none"), weight, x, None)
    assert output_error(Fp8(activations="none", compensate=True), weight, x, measured(x)) < 0.7 * plain


def test_rounding_columns_together_costs_little() -> None:
    x, weight = inputs(), torch.randn(16, 128)
    compensation = ErrorCompensation(measured(x), 0.01, act_order=True)
    errors = [
        float((x @ (compensation.round(weight, lambda v, _: (v * 4).round() / 4, step) - weight).t()).norm()) for step in (1, 16, 100)
    ]
    plain = float((x @ ((weight * 4).round() / 4 - weight).t()).norm())
    assert errors[0] <= errors[1] * 1.1 and errors[1] < 0.8 * plain


def test_the_searched_exponent_is_about_the_best_one() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    searched = output_error(SmoothQuant(), weight, x, stats)
    assert searched <= 1.05 * min(output_error(SmoothQuant(alpha=a), weight, x, stats) for a in (0.0, 0.3, 0.5, 0.8, 1.0))


def test_a_static_input_scale_has_a_fixed_exponent() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    chosen = [SmoothQuant(per_token=False, alpha=alpha).folding_factors(weight, spec, measured(x)) for alpha in (None, 0.8)]
    assert chosen[0] is not None and chosen[1] is not None and torch.equal(*chosen)


@pytest.mark.parametrize("act_order", [False, True])
def test_the_remaining_error_is_what_later_columns_cannot_correct(act_order: bool) -> None:
    """Compared with least squares in float64 over the later columns, for each column separately."""
    x = inputs(24)
    stats, compensation = measured(x), ErrorCompensation(measured(x), 0.01, act_order)
    moment = x.double().t() @ x.double() / len(x)
    moment += torch.eye(24) * moment.diagonal().mean() * 0.01
    remaining = compensation.remaining_error()
    for position, column in enumerate(compensation.order.tolist()):
        later = compensation.order[position + 1 :]
        cross = moment[later, column]
        expected = moment[column, column] - cross @ torch.linalg.solve(moment[later][:, later], cross)
        assert float(remaining[column]) == pytest.approx(float(expected), rel=1e-2)
    assert stats.count == 600


@pytest.mark.parametrize("compensate", [False, True])
def test_the_expected_error_of_weights_is_the_measured_one(compensate: bool) -> None:
    """Error compensation minimizes the error of inputs with a little noise, so the prediction is for those."""
    x, weight = inputs(), torch.randn(64, 128)
    stats, chosen = measured(x), SmoothQuant(compensate=compensate)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    remaining = ErrorCompensation(stats, 0.01, act_order=True).remaining_error() if compensate else stats.mean_square
    expected = chosen._weight_error((weight,), torch.ones(128), remaining)
    stored = chosen.quantize(weight, spec, stats)
    difference = stored["weight"].double() * stored["scale"].double()[:, None] - weight
    noise = float(stats.mean_square.mean()) * 0.01 if compensate else 0.0
    error = (x.double() @ difference.t()).square().sum(1).mean() + noise * difference.square().sum()
    assert float(error) == pytest.approx(expected, rel=0.3)


def test_rows_of_a_part_except_outliers_share_a_scale() -> None:
    weight = torch.randn(48, 128)
    weight[5] *= 50
    weight[32:] *= 7
    spec = LinearSpec(name="x", in_features=128, parts=(32, 16))
    stored = SmoothQuant(per_channel=False, compensate=False).quantize(weight, spec)
    scale = stored["scale"]
    shared = torch.cat((scale[:5], scale[6:32]))
    assert shared.unique().numel() == 1 and scale[32:].unique().numel() == 1
    assert scale[5] == pytest.approx(float(weight[5].abs().max() / 127)) and scale[5] > 10 * shared[0]
    errors = (stored["weight"].double() * scale.double()[:, None] - weight).norm(dim=1) / weight.double().norm(dim=1)
    assert errors.max() < 0.02
    stacked = SmoothQuant(per_channel=False, compensate=False).quantize(torch.stack((weight, weight)), spec)
    assert torch.equal(stacked["scale"], torch.stack((scale, scale)))


def test_error_compensation_of_int8_reduces_the_error() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    errors = []
    for compensate in (False, True):
        stored = SmoothQuant(compensate=compensate).quantize(weight, spec, measured(x))
        errors.append(float((x.double() @ (stored["weight"].double() * stored["scale"].double()[:, None] - weight).t()).norm()))
    assert errors[1] < 0.6 * errors[0]


def test_gptq_of_independent_inputs_is_plain_rounding() -> None:
    weight = torch.randn(8, 64)
    spec, ones = LinearSpec(name="x", in_features=64, parts=(8,)), torch.ones(64)
    stats = InputStats(torch.eye(64) * 9, ones, ones, torch.eye(64), 9)
    ours, plain = GPTQ(group_size=32, clip=False).quantize(weight, spec, stats), Int4(group_size=32, clip=False).quantize(weight, spec)
    assert all(torch.equal(ours[suffix], plain[suffix]) for suffix in plain)


def test_gptq_supports_inputs_that_are_always_zero() -> None:
    x = inputs()
    x[:, 5:9] = 0
    assert output_error(GPTQ(group_size=32), torch.randn(16, 128), x, measured(x)) < 0.2


def test_scale_folding_reduces_the_error_of_static_activations() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    smooth = output_error(SmoothQuant(per_token=False), weight, x, stats)
    plain = output_error(SmoothQuant(per_token=False, alpha=0.0), weight / weight.abs().amax(0), x, stats)
    assert smooth < 0.5 * plain


def test_calibrated_formats_require_measured_inputs() -> None:
    spec = LinearSpec(name="layers.0.mlp.up", in_features=64, parts=(8,))
    for chosen in (GPTQ(), SmoothQuant(per_token=False), Fp8(compensate=True)):
        with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up"):
            chosen.quantize(torch.randn(8, 64), spec, None)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "gemma2": {"head_dim": 8},  # norms before and after the blocks
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "cohere": {},  # one norm for attention and MLP
    "gpt_neox": {},  # two parallel norms
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},  # relu
    "olmo2": {},  # norms after the blocks
}


def _dense_layer(prepared: BuildPlan, dense: Loader) -> dict[str, Tensor]:
    """The first layer's tensors, unquantized, by engine name."""
    return {name: tensor for spec in layer_specs(prepared.config.model, 0).values() for name, tensor in dense_tensors(spec, dense).items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_scale_folding_does_not_change_a_layer(model_type: str, tmp_path: Path) -> None:
    """The residual stream is the same with arbitrary factors. A wrong fold would change it by far more than the tolerance."""
    made = tiny.model(model_type, **MODELS[model_type])
    made.save_pretrained(tmp_path)  # with the names of the hub for experts
    prepared = prepare(tmp_path, BuildConfig(device="cpu"))
    model = prepared.config.model
    dense = Loader(CheckpointTensorSource(prepared.converter()), Recipe(), torch.float32, CPU, SINGLE)
    torch.manual_seed(3)
    stream = LayerwiseModel(model, split_windows(torch.randint(0, 320, (60,)).tolist(), 30))
    stream.embed(dense)
    weights = _dense_layer(prepared, dense)
    found = scale_folding.scale_folds(model.layers[0], "layers.0")
    assert found or model_type == "olmo2"
    consumers = {consumer for fold in found for consumer in fold.consumers}
    for fold in found:
        size = weights[f"{fold.consumers[0]}.weight"].shape[-1]
        factors = scale_folding.fold_factors(fold, torch.rand(size) * 2 + 0.5, weights)
        assert factors.shape == (size,)
    before = stream.hidden
    stream.run_layer(dense)
    expected = stream.hidden
    stream.layer, stream.hidden = 0, before
    stream.run_layer(Loader(TensorTable(weights), Recipe(), torch.float32, CPU, SINGLE))
    for ours, theirs in zip(stream.hidden, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    if model_type in ("llama", "qwen2", "mixtral"):
        assert consumers >= {"layers.0.attention.qkv", "layers.0.attention.out"}


def test_cache_scales_follow_the_largest_magnitude_of_each_head() -> None:
    queries, keys = torch.randn(2, 5, 6, 8), torch.randn(2, 3, 5, 8)
    stats = CacheStats(AttentionConfig(num_heads=6, num_kv_heads=3, head_size=8), "int8")
    for i in range(2):
        stats.add(queries[i], keys[i : i + 1], keys[i : i + 1] * 2)
    found = stats.tensors()
    assert set(found) == {"key_scale", "value_scale", "key_balance"}
    assert torch.allclose(found["value_scale"], keys.abs().amax(dim=(0, 2, 3)) * 2 / 127)
    spread = hadamard_transform(keys.transpose(1, 2).flatten(0, 1) * found["key_balance"][:, 0], 0, False)
    assert torch.allclose(found["key_scale"], spread.abs().amax(dim=(0, 2)) / 127)


def test_e4m3_scales_of_latents_are_powers_of_two_that_cover_the_largest() -> None:
    latent = MLAConfig(num_heads=2, q_rank=None, kv_rank=6, rope_size=2, nope_size=4, v_size=4, rope=RopeConfig(dim=2), norm=NormConfig())
    keys, stats = torch.randn(2, 3, 5, 8) * 30, CacheStats(latent, "float8_e4m3fn")
    stats.add(torch.randn(5, 2, 8), keys, None)
    assert set(stats.tensors()) == {"key_scale"}
    scale, largest = stats.tensors()["key_scale"], keys.abs().amax(dim=(0, 2, 3))
    assert torch.equal(scale.log2().round().exp2(), scale)
    assert bool((largest / scale <= 448).all()) and bool((largest / scale > 223).all())
