"""Calibration: statistics, scales that are free, ranges of the cache, and the formats that use them, against plain rounding."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from tokenizers import Tokenizer
from torch import Tensor

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError, EngineError
from stoker.builder import calibration_text
from stoker.builder.accuracy import check_accuracy
from stoker.builder.build import build
from stoker.builder.calibrate import CheckpointSource, State, dense_tensors
from stoker.builder.calibration_text import calibration_windows, read_text
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import Prepared, prepare
from stoker.distributed.group import SINGLE
from stoker.engine.reader import Engine
from stoker.engine.stream import LayerStream, Scores, windows
from stoker.layers.decoder import layer_specs
from stoker.layers.loader import Loader
from stoker.layers.specs import LinearSpec
from stoker.quant import fold as folding
from stoker.quant.awq import AWQ
from stoker.quant.calibration import KVRange, TensorTable, default_text, held_out_text
from stoker.quant.compensate import Compensation
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.gptq import GPTQ
from stoker.quant.int4 import Int4
from stoker.quant.recipe import Recipe
from stoker.quant.smoothquant import SmoothQuant
from stoker.quant.stats import InputStats

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"calibration_size": 4, "calibration_seq_len": 64, "device": "cpu"}


def inputs(columns: int = 128, count: int = 600) -> Tensor:
    """Correlated inputs, a few of them far larger than the rest, as layers of language models see."""
    torch.manual_seed(1)
    x = torch.randn(count, columns // 4) @ torch.randn(columns // 4, columns) * 0.3 + torch.randn(count, columns) * 0.3
    x[:, ::29] *= 20
    return x


def measured(x: Tensor) -> InputStats:
    stats = InputStats.zeros(x.shape[1], CPU)
    for piece in x.split(100):
        stats.add(piece)
    return stats


def output_error(chosen: Format, weight: Tensor, x: Tensor, stats: InputStats | None) -> float:
    """Relative error of the outputs, with the format's own scaling of the inputs if it asks for one."""
    spec = LinearSpec(name="x", in_features=weight.shape[1], parts=(weight.shape[0],))
    factors = None if stats is None else chosen.smooth(weight, spec, stats)
    if factors is None:
        factors = torch.ones(weight.shape[1])
    scaled = None if stats is None else stats.divided(factors)
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
    divided, again = stats.divided(factors), measured(x / factors)
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
def test_awq_and_gptq_undo_most_of_the_error_of_rounding(zero: Any) -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    plain = output_error(Int4(group_size=128, zero=zero, clip=False), weight, x, None)
    assert output_error(AWQ(group_size=128, zero=zero), weight, x, stats) < 0.6 * plain
    assert output_error(GPTQ(group_size=128, zero=zero), weight, x, stats) < 0.5 * plain
    assert output_error(GPTQ(group_size=128, zero=zero, act_order=False), weight, x, stats) < 0.6 * plain


def test_fp8_makes_up_for_its_rounding() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    plain = output_error(Fp8(activations="none"), weight, x, None)
    assert output_error(Fp8(activations="none", compensate=True), weight, x, measured(x)) < 0.7 * plain


def test_rounding_columns_together_costs_little() -> None:
    x, weight = inputs(), torch.randn(16, 128)
    by = Compensation(measured(x), 0.01, act_order=True)
    errors = [float((x @ (by.round(weight, lambda v, _: (v * 4).round() / 4, step) - weight).t()).norm()) for step in (1, 16, 100)]
    plain = float((x @ ((weight * 4).round() / 4 - weight).t()).norm())
    assert errors[0] <= errors[1] * 1.1 and errors[1] < 0.8 * plain


def test_the_exponent_of_smoothing_is_the_best_that_was_tried() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    searched = output_error(SmoothQuant(), weight, x, stats)
    assert searched <= 1.05 * min(output_error(SmoothQuant(alpha=a), weight, x, stats) for a in (0.0, 0.3, 0.5, 0.8, 1.0))


def test_one_scale_for_all_tokens_leaves_room() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    chosen = [SmoothQuant(per_token=False, alpha=alpha).smooth(weight, spec, measured(x)) for alpha in (None, 0.8)]
    assert chosen[0] is not None and chosen[1] is not None and torch.equal(*chosen)


@pytest.mark.parametrize("act_order", [False, True])
def test_what_lasts_of_an_error_is_what_later_columns_cannot_make_up_for(act_order: bool) -> None:
    """By least squares in float64 over the later columns, for each column on its own."""
    x = inputs(24)
    stats, by = measured(x), Compensation(measured(x), 0.01, act_order)
    moment = x.double().t() @ x.double() / len(x)
    moment += torch.eye(24) * moment.diagonal().mean() * 0.01
    lasting = by.lasting()
    for place, column in enumerate(by.order.tolist()):
        later = by.order[place + 1 :]
        cross = moment[later, column]
        left = moment[column, column] - cross @ torch.linalg.solve(moment[later][:, later], cross)
        assert float(lasting[column]) == pytest.approx(float(left), rel=1e-2)
    assert stats.count == 600


@pytest.mark.parametrize("compensate", [False, True])
def test_the_error_to_be_expected_of_weights_is_the_one_that_comes(compensate: bool) -> None:
    """Compensation minimizes, and so foretells, the error of inputs with a little noise."""
    x, weight = inputs(), torch.randn(64, 128)
    stats, chosen = measured(x), SmoothQuant(compensate=compensate)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    lasting = Compensation(stats, 0.01, act_order=True).lasting() if compensate else stats.mean_square
    expected = chosen._weight_error((weight,), torch.ones(128), lasting)
    stored = chosen.quantize(weight, spec, stats)
    wrong = stored["weight"].double() * stored["scale"].double()[:, None] - weight
    noise = float(stats.mean_square.mean()) * 0.01 if compensate else 0.0
    came = (x.double() @ wrong.t()).square().sum(1).mean() + noise * wrong.square().sum()
    assert float(came) == pytest.approx(expected, rel=0.3)


def test_rows_of_a_part_share_a_scale_but_for_outliers() -> None:
    weight = torch.randn(48, 128)
    weight[5] *= 50
    weight[32:] *= 7
    spec = LinearSpec(name="x", in_features=128, parts=(32, 16))
    stored = SmoothQuant(per_channel=False, compensate=False).quantize(weight, spec)
    scale = stored["scale"]
    shared = torch.cat((scale[:5], scale[6:32]))
    assert shared.unique().numel() == 1 and scale[32:].unique().numel() == 1
    assert scale[5] == weight[5].abs().max() / 127 and scale[5] > 10 * shared[0]
    wrong = (stored["weight"].double() * scale.double()[:, None] - weight).norm(dim=1) / weight.double().norm(dim=1)
    assert wrong.max() < 0.02
    stacked = SmoothQuant(per_channel=False, compensate=False).quantize(torch.stack((weight, weight)), spec)
    assert torch.equal(stacked["scale"], torch.stack((scale, scale)))


def test_int8_makes_up_for_its_rounding() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    spec = LinearSpec(name="x", in_features=128, parts=(64,))
    wrong = []
    for compensate in (False, True):
        stored = SmoothQuant(compensate=compensate).quantize(weight, spec, measured(x))
        wrong.append(float((x.double() @ (stored["weight"].double() * stored["scale"].double()[:, None] - weight).t()).norm()))
    assert wrong[1] < 0.6 * wrong[0]


def test_gptq_of_independent_inputs_is_rounding() -> None:
    weight = torch.randn(8, 64)
    spec, ones = LinearSpec(name="x", in_features=64, parts=(8,)), torch.ones(64)
    stats = InputStats(torch.eye(64) * 9, ones, ones, torch.eye(64), 9)
    ours, plain = GPTQ(group_size=32, clip=False).quantize(weight, spec, stats), Int4(group_size=32, clip=False).quantize(weight, spec)
    assert all(torch.equal(ours[suffix], plain[suffix]) for suffix in plain)


def test_gptq_takes_inputs_that_never_occur() -> None:
    x = inputs()
    x[:, 5:9] = 0
    assert output_error(GPTQ(group_size=32), torch.randn(16, 128), x, measured(x)) < 0.2


def test_smoothing_saves_activations_with_one_scale() -> None:
    x, weight = inputs(), torch.randn(64, 128)
    stats = measured(x)
    smooth = output_error(SmoothQuant(per_token=False), weight, x, stats)
    plain = output_error(SmoothQuant(per_token=False, alpha=0.0), weight / weight.abs().amax(0), x, stats)
    assert smooth < 0.5 * plain


def test_calibrated_formats_without_measurements_are_refused() -> None:
    spec = LinearSpec(name="layers.0.mlp.up", in_features=64, parts=(8,))
    for chosen in (GPTQ(), SmoothQuant(per_token=False), Fp8(compensate=True)):
        with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up"):
            chosen.quantize(torch.randn(8, 64), spec, None)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "gemma2": {"head_dim": 8},  # norms on both sides
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "cohere": {},  # one norm for attention and MLP
    "gpt_neox": {"num_key_value_heads": 6},  # two norms, side by side
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},  # relu
    "olmo2": {},  # norms after
}


def _dense_layer(prepared: Prepared, dense: Loader) -> dict[str, Tensor]:
    """The first layer's tensors, unquantized, by engine name."""
    return {name: tensor for spec in layer_specs(prepared.config.model, 0).values() for name, tensor in dense_tensors(spec, dense).items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_folds_leave_a_layer_as_it_was(model_type: str, tmp_path: Path) -> None:
    """Arbitrary factors, undone in norms and rows: the same stream comes out. A wrong fold changes it grossly."""
    made = tiny.model(model_type, **MODELS[model_type])
    made.save_pretrained(tmp_path)  # experts in the hub's spelling
    prepared = prepare(tmp_path, BuildConfig(device="cpu"))
    model = prepared.config.model
    dense = Loader(CheckpointSource(prepared, CPU), Recipe(), torch.float32, CPU, SINGLE)
    torch.manual_seed(3)
    stream = LayerStream(model, windows(torch.randint(0, 320, (60,)).tolist(), 30))
    stream.begin(dense)
    weights = _dense_layer(prepared, dense)
    found = folding.folds(model.layers[0], "layers.0")
    assert found or model_type == "olmo2"
    consumers = {consumer for fold in found for consumer in fold.consumers}
    for fold in found:
        size = weights[f"{fold.consumers[0]}.weight"].shape[-1]
        factors = folding.apply(fold, torch.rand(size) * 2 + 0.5, weights)
        assert factors.shape == (size,)
    before = stream.hidden
    stream.advance(dense)
    expected = stream.hidden
    stream.layer, stream.hidden = 0, before
    stream.advance(Loader(TensorTable(weights), Recipe(), torch.float32, CPU, SINGLE))
    for ours, theirs in zip(stream.hidden, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    if model_type in ("llama", "qwen2", "mixtral"):
        assert consumers >= {"layers.0.attention.qkv", "layers.0.attention.out"}


def test_kv_ranges_are_the_largest_of_each_head() -> None:
    keys = torch.randn(2, 3, 5, 8)
    found = KVRange("int8")
    found.add(keys[:1], keys[:1] * 2)
    found.add(keys[1:], keys[1:] * 2)
    scales = found.scales()
    assert torch.allclose(scales["key_scale"], keys.abs().amax(dim=(0, 2, 3)) / 127)
    assert torch.allclose(scales["value_scale"], scales["key_scale"] * 2)


def test_scales_of_e4m3_are_powers_of_two_that_hold_the_largest() -> None:
    keys, latent = torch.randn(2, 3, 5, 8) * 30, KVRange("float8_e4m3fn")
    latent.add(keys, None)
    assert set(latent.scales()) == {"key_scale"}
    scale, largest = latent.scales()["key_scale"], keys.abs().amax(dim=(0, 2, 3))
    assert torch.equal(scale.log2().round().exp2(), scale)
    assert bool((largest / scale <= 448).all()) and bool((largest / scale > 223).all())


def test_shipped_text_is_cut_in_two_that_share_nothing() -> None:
    assert len(default_text()) > 200_000 and len(held_out_text()) == 24_000
    assert held_out_text()[:200] not in default_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model(), tmp_path_factory.mktemp("quant") / "hf")


def test_an_interrupted_calibration_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(quantization="AWQ", kv_cache_dtype="int8", max_perplexity_increase=9.0, **QUICK)
    whole = build(checkpoint, tmp_path / "whole", config)
    real, saved = State.save, []

    def failing(self: State, index: int, *rest: Any) -> None:
        saved.append(index)
        if index == 1 and len(saved) == 2:
            raise KeyboardInterrupt
        real(self, index, *rest)

    monkeypatch.setattr(State, "save", failing)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "again", config)
    again = build(checkpoint, tmp_path / "again", config)
    assert saved == [0, 1, 1, 2]
    assert again.config.files["rank0.safetensors"] == whole.config.files["rank0.safetensors"]
    assert not list((tmp_path / "cache").glob("calibration/*")), "what was kept for resuming is gone with the finished build"
    assert again.config.recipe.calibration == {"data": "default", "size": 4, "seq_len": 64}


def interrupted(checkpoint: Path, out: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is killed when its first layer is calibrated and kept."""
    real = State.save

    def failing(self: State, index: int, *rest: Any) -> None:
        real(self, index, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(State, "save", failing)
        with pytest.raises(KeyboardInterrupt):
            build(checkpoint, out, config)


def layers_saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    real, saved = State.save, []
    monkeypatch.setattr(State, "save", lambda self, index, *rest: (saved.append(index), real(self, index, *rest)))
    return saved


def test_other_positions_do_not_go_on_where_these_stopped(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    turned = msgspec.structs.replace(config, rotary_base=500.0)
    interrupted(checkpoint, tmp_path / "plain", config, monkeypatch)
    saved = layers_saved(monkeypatch)
    build(checkpoint, tmp_path / "turned", turned)
    assert saved == [0, 1, 2], "layers that were calibrated with other rotary positions are not this engine's"
    build(checkpoint, tmp_path / "plain", config)
    assert saved == [0, 1, 2, 1, 2], "and what was kept for another build stays"


@pytest.mark.parametrize("damaged", ["layer-0", "hidden-000001"])
def test_what_was_kept_is_not_believed_when_it_is_damaged(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    interrupted(checkpoint, tmp_path / "engine", config, monkeypatch)
    file = next((tmp_path / "cache" / "calibration").glob(f"*/*/{damaged}.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    saved = layers_saved(monkeypatch)
    build(checkpoint, tmp_path / "engine", config)
    assert saved == [0, 1, 2]


def test_two_builds_at_once_do_not_disturb_each_other(checkpoint: Path, tmp_path: Path) -> None:
    """Another process holds the lock of the same calibration, and its files are neither taken nor removed."""
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    prepared = prepare(checkpoint, config).with_fingerprint()
    tokens = calibration_windows(checkpoint, None, config.calibration_size, config.calibration_seq_len)
    theirs = State(prepared, tokens).path
    hold = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold, f"{theirs}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == b"held\n"
        (theirs / "layer-0.new").write_bytes(b"half")
        build(checkpoint, tmp_path / "engine", config)
        assert (theirs / "layer-0.new").read_bytes() == b"half"
        assert not list(theirs.parent.glob(f"{theirs.name}-*")), "its own files are gone"
        other.stdin.close()


@pytest.mark.parametrize("kv_cache", ["int8", "float8_e4m3fn"])
def test_cache_scales_are_measured_and_used(checkpoint: Path, tmp_path: Path, kv_cache: str) -> None:
    engine = build(
        checkpoint, tmp_path / "engine", BuildConfig(kv_cache_dtype=kv_cache, max_perplexity_increase=1.0, **QUICK), verify="files"
    )
    tokens = windows(list(range(1, 200)), 64)
    exact = build(checkpoint, tmp_path / "exact", BuildConfig(device="cpu"), verify="files")
    scores = [LayerStream(e.config.model, tokens).run(e.loader()) for e in (engine, exact)]
    assert engine.kv_dtype == getattr(torch, kv_cache)
    assert scores[0].nll != scores[1].nll
    assert scores[0].perplexity == pytest.approx(scores[1].perplexity, rel=0.02)
    # e4m3 has exponents of its own: only a scale that is far off would hurt it.
    other = Loader(_Assumed(engine, 1.0 if kv_cache == "int8" else 1e-3), engine.config.recipe, torch.float32, CPU, SINGLE)
    assumed = LayerStream(engine.config.model, tokens).run(other)
    assert abs(assumed.nll - scores[1].nll) > 3 * abs(scores[0].nll - scores[1].nll), "assumed scales would be worse"


class _Assumed(TensorTable):
    """The engine's tensors, with the same scale for every head."""

    def __init__(self, engine: Engine, scale: float) -> None:
        self.source, self.scale = engine.source(), scale

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self.source.get(name, shape, dtype)
        return torch.full_like(found, self.scale) if name.endswith(("key_scale", "value_scale")) else found


def test_the_accuracy_check_reports_and_refuses(checkpoint: Path, tmp_path: Path) -> None:
    config = BuildConfig(quantization="WEIGHTS_ONLY_INT4", quantization_settings={"group_size": 128, "zero": "none"}, **QUICK)
    engine = build(checkpoint, tmp_path / "engine", msgspec.structs.replace(config, max_perplexity_increase=9.0))
    found = engine.config.checks["accuracy"]
    assert found["tokens"] > 100 and found["skipped"] == ""
    assert found["increase"] == pytest.approx(found["perplexity_after"] / found["perplexity_before"] - 1)
    assert 0 < found["greedy_agreement"] < 1
    strict = msgspec.structs.replace(config, max_perplexity_increase=found["increase"] - 0.01)
    with pytest.raises(EngineError, match=r"WEIGHTS_ONLY_INT4 raises perplexity by .*% is allowed.*--max-perplexity-increase"):
        build(checkpoint, tmp_path / "refused", strict)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("after", "says"), [(math.nan, "makes a model without a perplexity"), (0.0, None), (1e-3, "and 0.0% is allowed")])
def test_the_accuracy_check_at_its_edges(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, says: str | None
) -> None:
    """Nothing may be lost: what loses nothing passes, what has no perplexity does not."""
    runs = iter((Scores(nll=100.0, count=50), Scores(nll=100.0 + after, count=50)))
    monkeypatch.setattr("stoker.builder.accuracy._run", lambda *_: next(runs))
    config = BuildConfig(quantization="WEIGHTS_ONLY_INT8", max_perplexity_increase=0.0, **QUICK)
    with pytest.raises(EngineError, match=says) if says else contextlib.nullcontext():
        build(checkpoint, tmp_path / "engine", config)
    assert (tmp_path / "engine").exists() is (says is None)


@pytest.mark.parametrize("recipe", ["FP8", "WEIGHTS_KV_INT8"])
def test_engines_of_several_ranks_are_measured_whole(recipe: str, checkpoint: Path, tmp_path: Path) -> None:
    config = BuildConfig(quantization=recipe, max_perplexity_increase=9.0, **QUICK)
    split = msgspec.structs.replace(config, mapping=Mapping(tensor_parallel=2))
    one, two = (build(checkpoint, tmp_path / str(i), each).config.checks["accuracy"] for i, each in enumerate((config, split)))
    assert one["tokens"] == two["tokens"] > 100
    assert two["perplexity_after"] == pytest.approx(one["perplexity_after"], rel=1e-6)
    assert two["perplexity_after"] != two["perplexity_before"]


def test_a_quantized_cache_alone_is_measured_too(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(kv_cache_dtype="int8", **QUICK))
    found = engine.config.checks["accuracy"]
    assert 0 < abs(found["increase"]) < 0.01


def test_perplexity_before_is_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    ids = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(5)).tolist()
    ours = LayerStream(engine.config.model, windows(ids, 40)).run(engine.loader())
    model = tiny.model()
    with torch.inference_mode():
        losses = [
            (model(torch.tensor([part]), labels=torch.tensor([part])).loss, len(part) - 1) for part in (ids[:40], ids[40:80], ids[80:])
        ]
    assert ours.count == 97
    assert ours.nll == pytest.approx(float(sum(loss * count for loss, count in losses)), rel=1e-4)


def test_without_a_tokenizer_nothing_is_calibrated(checkpoint: Path, tmp_path: Path) -> None:
    prepared = prepare(checkpoint, BuildConfig(quantization="WEIGHTS_ONLY_INT8", **QUICK))
    assert check_accuracy(prepared, tmp_path, ask=True, progress=lambda *_: None).skipped == "there is no tokenizer"


def test_calibration_data_comes_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"article": "third"}\n')
    (tmp_path / "c.json").write_text('["fourth"]')
    assert read_text(str(tmp_path)) == "first\n\nsecond\n\nthird\n\nfourth"
    (tmp_path / "c.json").write_text('[{"label": 1}]')
    with pytest.raises(ConfigError, match=r"c\.json: a row has no text, content or article"):
        read_text(str(tmp_path))
    (tmp_path / "d.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"d\.bin is no text"):
        read_text(str(tmp_path / "d.bin"))


def test_calibration_data_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, says in (
        ("[1, 2]", "a row has no text"),
        ("null", "a row has no text"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no text"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_text(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="calibration_data='' names nothing"):
        read_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no text"):
        read_text(str(tmp_path / "empty"))
    monkeypatch.setattr(calibration_text, "MAX_BYTES", 100)
    rows = [{"text": "four words and ten"}] * 20
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_text(str(tmp_path / "b.jsonl")) == "\n\n".join(["four words and ten"] * 3), "of a long file the first rows that are whole"
    (tmp_path / "c.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"c\.json is larger than the 100 bytes of text that are read"):
        read_text(str(tmp_path / "c.json"))


@pytest.mark.parametrize("text", ["the quick brown fox " * 2000, " " * 50_000, "x\n" * 20_000, "\x00\xff" * 9000, "one line"])
def test_windows_of_a_long_text_are_those_of_all_of_it(checkpoint: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = windows(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text, add_special_tokens=False).ids, 32, 4)
    monkeypatch.setattr(calibration_text, "CHARS_PER_TOKEN", 1)
    found = calibration_text.token_windows(checkpoint, text, 4, 32)
    assert len(found) == len(whole) and all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
