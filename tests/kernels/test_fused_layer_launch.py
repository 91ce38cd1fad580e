"""Launch plans, layouts and requirements of the fused layer kernels. Their results are checked in test_emulated.py and tests/gpu."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.fused_layer import requirements
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.large_batch.config import NUM_WARPGROUPS, shared_offsets, stage_bytes
from stoker.kernels.triton.fused_layer.launch import supports_fused_layer
from stoker.kernels.triton.fused_layer.requirements import FORMATS, SHARED_BYTES, meets_requirements
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.ptx.wgmma import first_features, operand_offset
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion

TUNING = tuning_for("NVIDIA H200", 90)
COSTS = TUNING.costs.fused_layer_large_batch
assert COSTS is not None
NUM_CTAS = 132


def fused_layer_of(heads: int, hidden: int, size: int, qkv: int, group_size: int) -> FusedLayer:
    """An int4 layer of meta tensors: features of the heads, of the residual stream, of the MLP, and of q, k and v."""
    norm = Fusion("rms", torch.empty(hidden, dtype=torch.bfloat16, device="meta"), None, 1e-5)

    def linear(n: int, k: int, fusion: Fusion) -> FusedLinear:
        scale = torch.empty(k // group_size, n, dtype=torch.float16, device="meta")
        values = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
        weight = PackedWeight("int4", values, scale, group_size=group_size, layout="paired")
        return FusedLinear(lambda x, fusion: x, weight, fusion)

    up = linear(2 * size, hidden, replace(norm, gate="silu"))
    return FusedLayer(linear(hidden, heads, PLAIN), up, linear(hidden, size, PLAIN), linear(qkv, hidden, norm))


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have the tiles and costs of an H200."""
    for module in (small_batch, large_batch):
        monkeypatch.setattr(module, "device_tuning", lambda device: TUNING)


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`supports_fused_layer` on a device that meets the kernels' requirements and has NUM_CTAS SMs."""
    monkeypatch.setattr(requirements, "supports", lambda x, feature: True)
    for module in (small_batch, large_batch):
        monkeypatch.setattr(module, "num_sms", lambda device: NUM_CTAS)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [5, 9, 32, 64])
def test_plans_fit_into_shared_memory_and_cover_all_blocks(rows: int, group_size: int) -> None:
    pick = random.Random(rows * group_size)
    shapes = [[256 * pick.randint(1, 48) for _ in range(4)] for _ in range(12)] + [[4096, 4096, 14336, 6144], [8192, 8192, 28672, 10240]]
    for shape in shapes:
        layer = fused_layer_of(*shape, group_size)
        plan = large_batch.plan_for(layer, rows, NUM_CTAS)
        assert plan is not None and plan.num_stages >= 2 and plan.num_tokens >= rows
        assert shared_offsets(plan.num_stages, plan.num_tokens, plan.max_slice_blocks, group_size)[-1] <= SHARED_BYTES
        sizes = large_batch._sizes(layer)
        assert large_batch._partials_count(sizes, plan) <= large_batch._max_partials_count(sizes, group_size, NUM_CTAS, COSTS)
        for linear, split_k in zip(layer.linears, plan.split_k, strict=True):
            blocks, tiles = linear.weight.values.shape[1] // 128, linear.weight.out_features // 64  # type: ignore[union-attr]
            slice_blocks = -(-blocks // split_k)
            assert (split_k - 1) * slice_blocks < blocks <= split_k * slice_blocks <= split_k * plan.max_slice_blocks
            assert_no_tile_has_three_warpgroups(-(-tiles // (NUM_CTAS // split_k)), slice_blocks)


def assert_no_tile_has_three_warpgroups(tiles: int, blocks: int) -> None:
    """`run_of_warpgroup` cuts a CTA's blocks into runs of equal length."""
    run = max(-(-tiles * blocks // NUM_WARPGROUPS.value), blocks)
    assert NUM_WARPGROUPS.value * run >= tiles * blocks
    for tile in range(tiles):
        assert (tile * blocks + blocks - 1) // run - tile * blocks // run <= 1


def test_a_weight_too_wide_for_shared_memory_has_no_plan() -> None:
    wide = fused_layer_of(256, 256, 256 * 200 * large_batch.MAX_SPLIT_K, 256, 128)
    assert large_batch.plan_for(wide, 64, NUM_CTAS) is None


def test_a_stage_has_room_for_the_scales_and_zeros_of_its_groups() -> None:
    assert [stage_bytes(group_size) - 2048 for group_size in (128, 64, 32)] == [16 * 2 * 2 * groups for groups in (2, 4, 8)]


@pytest.mark.parametrize("tokens", [8, 32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_operand_has_the_features_of_the_weight_fragments(group_size: int, tokens: int) -> None:
    """Byte i of a row's block belongs to lane i / 32 and to instruction i % 32 / 4; bytes 0 and 2 of a word go to the first core matrix."""
    offsets = set()
    for byte in range(128):
        for side in range(2):
            feature = byte // group_size * 2 * group_size + side * group_size + byte % group_size  # as `pack_int4` pairs groups
            lane, instruction, at = byte // 32, byte % 32 // 4, byte % 4
            assert feature == first_features(group_size)[lane] + side * group_size + byte % 32
            for token in range(tokens):
                core_matrix = ((side * 8 + instruction) * (tokens // 8) + token // 8) * 2 + at % 2
                offset = operand_offset.fn(256 + feature, token, tokens, group_size)
                assert offset == 256 * tokens + core_matrix * 64 + token % 8 * 8 + 2 * lane + at // 2
                offsets.add(offset)
    assert offsets == set(range(256 * tokens, 512 * tokens))


@pytest.mark.usefixtures("supported")
def test_each_number_of_tokens_has_its_kernel() -> None:
    layer = fused_layer_of(1024, 1024, 2816, 1536, 128)
    assert [rows for rows in (1, 2, 3, 4, 33, 64, 65) if supports_fused_layer(layer, rows)] == [1, 2, 3, 4, 33, 64]
    assert [rows for rows in (1, 2, 3, 4, 33, 64, 65) if large_batch.supports_large_batch(layer, rows)] == [3, 4, 33, 64]


def test_every_format_has_a_tile() -> None:
    assert all(TUNING.tile("fused_layer_small_batch", "int8" if form == "bytes" else form) for form in FORMATS)


@pytest.mark.usefixtures("supported")
def test_unaligned_or_strided_scales_are_not_supported() -> None:
    layer = fused_layer_of(256, 256, 512, 256, 32)
    assert layer.down.weight is not None and layer.down.weight.scale is not None
    assert meets_requirements(layer) and small_batch.supports_small_batch(layer, 1)
    shape = layer.down.weight.scale.shape
    unaligned = torch.empty(shape.numel() + 1, dtype=torch.float16)[1:].view(shape)
    transposed = torch.empty(shape[::-1], dtype=torch.float16).T
    for scale in (unaligned, transposed):
        weight = replace(layer.down.weight, scale=scale)
        assert not meets_requirements(replace(layer, down=replace(layer.down, weight=weight)))
