"""Every weight format: its stored tensors, their error, and the results of its linears."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.specs import LinearSpec
from stoker.kernels.routing import RoutingParams
from stoker.kernels.types import Fusion
from stoker.quant import groups
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import FORMATS, Format
from stoker.quant.formats.awq import AWQ
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.gptq import GPTQ
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.formats.smoothquant import SmoothQuant
from stoker.quant.linear_ops import PackedExperts, PackedLinear
from stoker.quant.named_recipes import ALIASES, RECIPES, find_recipe
from stoker.quant.recipe import Recipe, decode_recipe, encode_recipe

E4M3 = 2**-4  # half a step of a value with three mantissa bits, relative
# (format, largest error of a weight, relative to the largest magnitude)
CASES: dict[str, tuple[Format, float]] = {
    "dense": (Dense(), 0.0),
    "int8": (Int8(), 0.5 / 127),
    "int8_grouped": (GroupedInt8(group_size=32), 0.5 / 127),
    "int8_grouped shifted": (GroupedInt8(group_size=16, shifted=True, scale_dtype="float16"), 0.52 / 127),
    "int4 symmetric 32": (Int4(group_size=32, zero="none", clip=False), 0.51 / 7),
    "int4 zero 64": (Int4(group_size=64, zero="int", clip=False), 2.2 / 15),
    "int4 offset 128": (Int4(group_size=128, zero="float", clip=False), 1.02 / 15),
    "int4 bfloat16 scales": (Int4(group_size=32, zero="int", scale_dtype="bfloat16", clip=False), 2.4 / 15),
    "awq": (AWQ(group_size=64, clip=False), 2.2 / 15),
    "gptq": (GPTQ(group_size=64, act_order=False, clip=False), 2.0),  # columns correct the errors of others
    "smoothquant": (SmoothQuant(compensate=False), 0.5 / 127),
    "smoothquant compensated": (SmoothQuant(), 1.5 / 127),
    "smoothquant one scale": (SmoothQuant(per_channel=False, per_token=False), 0.1),
    "fp8": (Fp8(activations="none"), E4M3),
    "fp8 one scale": (Fp8(weights="tensor", activations="static"), E4M3),
    "block_fp8": (BlockFp8(rows=16, columns=32), E4M3),
    "mxfp4": (Fp4(), 0.21),  # half a step of the largest values, relative to a largest magnitude of 5
    "nvfp4": (Fp4(group_size=16, scale="e4m3"), 0.21),
}
SIZES = {"even": (96, 128, 0), "ragged": (96, 144, 0), "experts": (32, 64, 3)}


def made(size: str, seed: int = 0) -> tuple[LinearSpec, Tensor, InputStats]:
    rows, columns, experts = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    spec = LinearSpec(name="layers.0.mlp.up", in_features=columns, parts=(rows // 2, rows // 2), split="column", num_experts=experts)
    weight = torch.randn(spec.weight_shape, generator=generator)
    stats = InputStats.zeros(columns, torch.device("cpu"))
    stats.add(torch.randn(4 * columns, columns, generator=generator))
    return spec, weight, stats


def multiplied(chosen: Format, spec: LinearSpec, stored: dict[str, Tensor], x: Tensor, bias: Tensor | None = None) -> Tensor:
    op = chosen.load(dict(stored), bias)
    assert not spec.num_experts
    return op(x)  # type: ignore[operator]


def real_weight(chosen: Format, spec: LinearSpec, stored: dict[str, Tensor]) -> Tensor:
    """The weight by which the linear multiplies, from unit vectors. There are more of them than PyTorch's packed kernel is used for."""
    return multiplied(chosen, spec, stored, torch.eye(spec.in_features)).t()


def test_every_format_has_a_case() -> None:
    assert {type(chosen) for chosen, _ in CASES.values()} == {FORMATS.get(name) for name in FORMATS}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_stored_tensors_are_as_declared(case: str, size: str) -> None:
    chosen, (spec, weight, stats) = CASES[case][0], made(size)
    stored = chosen.quantize(weight, spec, stats)
    layout = chosen.layout(spec, torch.float32)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {n: (part.shape, part.dtype) for n, part in layout.items()}
    assert all(t.is_contiguous() for t in stored.values())


@pytest.mark.parametrize("size", ["even", "ragged"])
@pytest.mark.parametrize("case", CASES)
def test_quantized_weights_are_within_a_step_of_the_weight(case: str, size: str) -> None:
    (chosen, bound), (spec, weight, stats) = CASES[case], made(size)
    if chosen.needs_calibration or isinstance(chosen, (Fp8, BlockFp8)):
        # Unit vectors are exact unless a static scale rounds them.
        chosen = _exact_activations(chosen)
    found = real_weight(chosen, spec, chosen.quantize(weight, spec, stats))
    largest = weight.abs().max()
    assert float((found - weight).abs().max() / largest) <= bound + 1e-6
    if bound:
        assert not torch.equal(found, weight)


def _exact_activations(chosen: Format) -> Format:
    if isinstance(chosen, Fp8):
        return msgspec.structs.replace(chosen, activations="none")
    return msgspec.structs.replace(chosen, per_token=True) if isinstance(chosen, SmoothQuant) else chosen


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("case", [name for name, (chosen, _) in CASES.items() if not isinstance(chosen, (SmoothQuant, Fp8, BlockFp8))])
@pytest.mark.parametrize("size", ["even", "ragged"])
def test_weight_only_linears_multiply_by_the_stored_weight(case: str, size: str, rows: int) -> None:
    chosen, (spec, weight, stats) = CASES[case][0], made(size)
    stored = chosen.quantize(weight, spec, stats)
    x, bias = torch.randn(rows, spec.in_features), torch.randn(spec.out_features)
    expected = x.double() @ real_weight(chosen, spec, stored).double().t() + bias
    found = multiplied(chosen, spec, stored, x, bias)
    # The packed int4 kernel computes in bfloat16: inputs, scales and results are rounded to 8 bits.
    tolerance = 0.02 if isinstance(chosen, Int4) and rows < 200 else 2e-4
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize(
    ("chosen", "bound"),
    [
        (Fp8(), 0.05),
        (Fp8(activations="static"), 0.05),
        (BlockFp8(rows=16, columns=16), 0.05),
        (SmoothQuant(), 0.02),
        (SmoothQuant(per_token=False), 0.03),
    ],
    ids=str,
)
def test_activations_are_rounded_to_eight_bits(chosen: Format, bound: float) -> None:
    spec, weight, stats = made("ragged")
    stored = chosen.quantize(weight, spec, stats)
    x = torch.randn(7, spec.in_features)
    exact = x @ weight.t()
    found = multiplied(chosen, spec, stored, x)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < bound
    alone = torch.cat([multiplied(chosen, spec, stored, row[None]) for row in x])
    assert torch.allclose(found, alone, atol=1e-4)  # the quantized values of a row do not depend on other rows


@pytest.mark.parametrize("case", [n for n, (c, _) in CASES.items() if isinstance(c, (Int4, GroupedInt8, BlockFp8)) and n != "gptq"])
def test_shards_are_slices(case: str) -> None:
    """Without statistics, a shard that ends at units is quantized like the same slice of the whole weight."""
    chosen, (spec, weight, _) = CASES[case][0], made("even")
    stored, layout = chosen.quantize(weight, spec), chosen.layout(spec, torch.float32)
    rows, columns = slice(32, 64), slice(64, 128) if getattr(chosen, "group_size", 1) <= 64 else slice(0, 128)
    part = weight[rows, columns].contiguous()
    shard = chosen.quantize(part, msgspec.structs.replace(spec, parts=(32,), in_features=part.shape[1]))
    for suffix, of in layout.items():
        cut = stored[suffix]
        for axis, unit, indices in ((of.row_axis, of.row_unit, rows), (of.col_axis, of.col_unit, columns)):
            if axis is not None:
                cut = cut.narrow(axis, indices.start // unit, -(-(indices.stop - indices.start) // unit))
        assert torch.equal(cut, shard[suffix]), suffix


@pytest.mark.parametrize("case", [name for name in CASES if name != "smoothquant one scale"])
def test_experts_compute_like_separate_linears(case: str) -> None:
    chosen, (spec, weight, stats) = CASES[case][0], made("experts")
    stored = chosen.quantize(weight, spec, stats)
    experts = chosen.load({k: v.clone() for k, v in stored.items()}, None)
    from stoker.kernels import ops

    x = torch.randn(9, spec.in_features)
    routing = ops.route(torch.randn(9, spec.num_experts), None, RoutingParams(top_k=2))
    found = experts.up(x, routing)  # type: ignore[union-attr]
    one = msgspec.structs.replace(spec, num_experts=0)
    for place, choice in enumerate(routing.order.tolist()):
        expert = int(torch.searchsorted(routing.offsets.long(), place, right=True)) - 1
        alone = {k: v if v.dim() == 1 and k == "input_scale" else v[expert].clone() for k, v in stored.items()}
        expected = multiplied(chosen, one, alone, x[choice // 2][None])[0]
        assert torch.allclose(found[place], expected, rtol=2e-2 if isinstance(chosen, Int4) else 1e-4, atol=2e-2), place


@pytest.mark.parametrize("case", CASES)
def test_experts_on_a_device_are_one_op(case: str) -> None:
    """One op per expert would require the host to wait for the number of rows of each."""
    chosen, (spec, _, _) = CASES[case][0], made("experts")
    stored = {suffix: torch.empty(row.shape, dtype=row.dtype, device="meta") for suffix, row in chosen.layout(spec, torch.bfloat16).items()}
    assert isinstance(chosen.load(stored, None), PackedExperts)


def test_quantized_linears_accept_fusions() -> None:
    spec, weight, _ = made("even")
    x, residual, gain = torch.randn(3, 128), torch.randn(3, 48), torch.rand(128) + 0.5
    fusion = Fusion(norm_kind="rms", norm_weight=gain, norm_eps=1e-6, gate="silu", residual=residual)
    stored = Int8().quantize(weight, spec)
    normalized = torch.nn.functional.rms_norm(x, (128,), gain, 1e-6)
    gate, up = multiplied(Int8(), spec, stored, normalized).chunk(2, dim=-1)
    found = Int8().load(dict(stored), None)(x, fusion)  # type: ignore[operator,call-arg]
    assert torch.allclose(found, torch.nn.functional.silu(gate) * up + residual, atol=1e-5)


@pytest.mark.parametrize("chosen", [Int8(), GroupedInt8(group_size=16), GroupedInt8(shifted=True)], ids=str)
def test_int8_weights_support_embedding(chosen: Format) -> None:
    spec, weight, _ = made("even")
    op = chosen.load(chosen.quantize(weight, spec), None)
    ids = torch.tensor([3, 0, 95], dtype=torch.int32)
    assert torch.allclose(op.embed(ids, torch.float32), weight[ids.long()], atol=float(weight.abs().max()) / 250)  # type: ignore[union-attr]


@pytest.mark.parametrize("shifted", [False, True])
def test_grouped_int8_is_widened_without_a_kernel(shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weight, _ = made("ragged")
    x, chosen = torch.randn(3, weight.shape[1]), GroupedInt8(group_size=64, shifted=shifted)
    stored = chosen.quantize(weight, spec)
    read = chosen.load(dict(stored), None)
    monkeypatch.setattr("stoker.kernels.ops.supports_int8_groups", lambda weight: False)
    widened = chosen.load(dict(stored), None)
    assert isinstance(widened, PackedLinear) and widened.weight.format == "dense"
    expected = widened(x)  # type: ignore[operator,call-arg]
    difference = (read(x) - expected).abs().max()  # type: ignore[operator,call-arg]
    assert difference < 1e-4 * expected.abs().max()  # the kernel may round activations to 16 bits


def test_int8_products_use_sixteen_bits_of_the_activations() -> None:
    spec, weight, _ = made("even")
    stored = Int8().quantize(weight, spec)
    x = torch.randn(4, 128) * torch.logspace(-3, 3, 4)[:, None]
    exact = x.double() @ (stored["weight"].double() * stored["scale"].double()[:, None]).t()
    found = multiplied(Int8(), spec, stored, x)
    assert float(((found - exact).abs().amax(-1) / exact.abs().amax(-1)).max()) < 1e-4


@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_int4_packs_even_features_into_low_bits(zero: str) -> None:
    packed = groups.pack(torch.arange(16).repeat(2).view(1, 32))
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]
    weight = torch.linspace(-1, 1, 32)[None]
    stored = Int4(group_size=32, zero=zero, clip=False).quantize(weight, LinearSpec(name="x", in_features=32, parts=(1,)))  # type: ignore[arg-type]
    assert set(stored) == {"weight", "scale"} | {"none": set(), "int": {"zero"}, "float": {"offset"}}[zero]


def test_clip_search_reduces_the_squared_error() -> None:
    spec, weight, stats = made("even")
    weight[:, ::37] *= 6

    def error(chosen: Int4, measured: InputStats | None = None) -> float:
        difference = real_weight(chosen, spec, chosen.quantize(weight, spec, measured)) - weight
        return float((difference @ stats.gram * difference).sum())

    plain, clipped = Int4(group_size=64, clip=False), Int4(group_size=64)
    assert error(clipped) < error(plain)
    assert error(clipped, stats) < error(plain)


def test_odd_inputs_and_misaligned_blocks_are_rejected() -> None:
    with pytest.raises(ConfigError, match="two input features per byte, which 33"):
        Int4().layout(LinearSpec(name="x", in_features=33, parts=(4,)), torch.float32)
    with pytest.raises(ConfigError, match="parts of 48, 16 rows do not consist of blocks of 32"):
        BlockFp8(rows=32).layout(LinearSpec(name="x", in_features=32, parts=(48, 16)), torch.float32)
    with pytest.raises(ConfigError, match="group_size=48"):
        Int4(group_size=48)
    with pytest.raises(ConfigError, match=r"alpha=1\.5"):
        SmoothQuant(alpha=1.5)


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_are_encoded_without_loss(name: str) -> None:
    recipe = find_recipe(name, {}, "int8")
    assert decode_recipe(json.loads(json.dumps(encode_recipe(recipe)))) == recipe
    assert recipe.kv_cache == "int8"


def test_overrides_are_encoded_with_their_types() -> None:
    recipe = Recipe(default=AWQ(group_size=32), overrides={"*.out": GPTQ(act_order=False), "head": Fp8(activations="static")}, name="AWQ")
    again = decode_recipe(json.loads(json.dumps(encode_recipe(recipe))))
    assert again == recipe and type(again.overrides["*.out"]) is GPTQ


@pytest.mark.parametrize(
    ("name", "row", "kv_cache"),
    [
        ("WEIGHTS_KV_INT8", "WEIGHTS_KV_INT8", "int8"), ("weights_int8", "WEIGHTS_ONLY_INT8", None),
        ("weights_kv_int4", "WEIGHTS_KV_INT4", "int8"), ("weights_int4_kv_int8", "WEIGHTS_KV_INT4", "int8"),
        ("smooth_quant", "SMOOTH_QUANT", None), ("smoothquant", "SMOOTH_QUANT", None), ("fp8_kv", "FP8_KV", "float8_e4m3fn"),
        ("awq", "AWQ", None), ("int4_awq", "AWQ", None), ("gptq", "GPTQ", None), ("no_quant", "NO_QUANT", None),
    ],
)  # fmt: skip
def test_recipe_names_ignore_case_and_have_aliases(name: str, row: str, kv_cache: str | None) -> None:
    recipe = find_recipe(name)
    assert (recipe.name, recipe.kv_cache) == (row, kv_cache)


def test_aliases_refer_to_recipes() -> None:
    assert set(ALIASES.values()) <= {*RECIPES, "AS_STORED"}


def test_settings_replace_fields_of_the_format_or_are_rejected() -> None:
    recipe = find_recipe("AWQ", {"group_size": "32", "zero": "none"})
    assert recipe.default == AWQ(group_size=32, zero="none") and recipe.overrides == {"embed": Int8(), "head": Int8()}
    assert find_recipe("smoothquant", {"alpha": 0.5, "per_token": "false"}).default == SmoothQuant(alpha=0.5, per_token=False)
    with pytest.raises(ConfigError, match=r"AWQ has no setting 'alpha'.*group_size"):
        find_recipe("AWQ", {"alpha": 0.5})
    with pytest.raises(ConfigError, match="group_size"):
        find_recipe("AWQ", {"group_size": 33})
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp4'"):
        find_recipe("AWQ", {}, "fp4")
    with pytest.raises(ConfigError, match=r"unknown quantization 'FP9'.*FP8"):
        find_recipe("FP9")


def test_fp8_of_narrow_models_uses_error_compensation() -> None:
    assert find_recipe("FP8", narrow=True).default == Fp8(compensate=True)
    assert find_recipe("FP8").default == Fp8()
    assert find_recipe("FP8", {"compensate": "false"}, narrow=True).default == Fp8()


def test_heads_and_embeddings_have_int8_in_8_and_4_bit_recipes() -> None:
    head, table = (LinearSpec(name=name, in_features=64, parts=(320,), quantize=False) for name in ("head", "embed"))
    for name in ("WEIGHTS_ONLY_INT4", "WEIGHTS_ONLY_INT8", "AWQ", "GPTQ"):
        assert isinstance(find_recipe(name).format_for(head), Int8) and isinstance(find_recipe(name).format_for(table), Int8)
    assert isinstance(find_recipe("FP8_KV").format_for(head), Int8)  # an embedding that is also the head is not quantized
    assert isinstance(find_recipe("FP8_KV").format_for(table), Dense) and isinstance(find_recipe(None).format_for(head), Dense)
