"""What the fused layer is launched with, and where its operand lies, without a GPU. Its results: tests/gpu/test_gpu_fused_layer.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from stoker.kernels.quantized import FusedLayer, FusedLinear, RowWeight
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.large_batch.kernel import shared_places
from stoker.kernels.triton.fused_layer.large_batch.schedule import GROUPS, slot_bytes
from stoker.kernels.triton.fused_layer.launch import supports_fused_layer
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.fused_layer.small_batch.launch import SHARED_BYTES
from stoker.kernels.triton.ptx.wgmma import column_features, place_of
from stoker.kernels.types import PLAIN, Fusion

PROGRAMS = 132


def fused_layer_of(heads: int, hidden: int, size: int, qkv: int, group: int) -> FusedLayer:
    norm = Fusion("rms", torch.empty(hidden, dtype=torch.bfloat16, device="meta"), None, 1e-5)

    def linear(n: int, k: int, fusion: Fusion) -> FusedLinear:
        grid = torch.empty(k // group, n, dtype=torch.float16, device="meta")
        codes = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
        return FusedLinear(lambda x, fusion: x, RowWeight("int4", codes, grid, None, None, "none", group), fusion)

    up = linear(2 * size, hidden, replace(norm, gate="silu"))
    return FusedLayer(linear(hidden, heads, PLAIN), up, linear(hidden, size, PLAIN), linear(qkv, hidden, norm))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [5, 9, 32, 64])
def test_plans_fit_and_leave_nothing_out(rows: int, group: int) -> None:
    pick = random.Random(rows * group)
    shapes = [[256 * pick.randint(1, 48) for _ in range(4)] for _ in range(12)] + [[4096, 4096, 14336, 6144], [8192, 8192, 28672, 10240]]
    for shape in shapes:
        layer = fused_layer_of(*shape, group)
        plan = large_batch.plan_of(layer, rows, PROGRAMS)
        assert plan is not None and plan.depth >= 2 and plan.tokens >= rows
        assert shared_places(plan.depth, plan.tokens, plan.share, group)[-1] <= SHARED_BYTES
        sizes = large_batch._sizes(layer)
        assert large_batch._words(sizes, plan) <= large_batch._most_words(sizes, group, PROGRAMS)
        for linear, parts in zip(layer.linears, plan.parts, strict=True):
            blocks, tiles = linear.weight.weight.shape[1] // 128, linear.weight.weight.shape[0] // 64  # type: ignore[union-attr]
            share = -(-blocks // parts)
            assert (parts - 1) * share < blocks <= parts * share <= parts * plan.share
            assert_no_tile_has_three_groups(-(-tiles // (PROGRAMS // parts)), share)


def assert_no_tile_has_three_groups(tiles: int, blocks: int) -> None:
    """As `blocks_of_group` shares a program's blocks out."""
    share = max(-(-tiles * blocks // GROUPS.value), blocks)
    assert GROUPS.value * share >= tiles * blocks
    for tile in range(tiles):
        assert (tile * blocks + blocks - 1) // share - tile * blocks // share <= 1


def test_a_weight_too_wide_for_its_ring_has_no_plan() -> None:
    wide = fused_layer_of(256, 256, 256 * 200 * large_batch.MOST_PARTS, 256, 128)
    assert large_batch.plan_of(wide, 64, PROGRAMS) is None


def test_a_slot_holds_what_its_groups_need() -> None:
    assert [slot_bytes(group) - 2048 for group in (128, 64, 32)] == [16 * 2 * 2 * count for count in (2, 4, 8)]


@pytest.mark.parametrize("tokens", [8, 32])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_tokens_lie_where_codes_meet_them(group: int, tokens: int) -> None:
    """Byte i of a row's block: lane i / 32, word i % 32 / 4, which is the instruction; its bytes 0 and 2 meet the first brick."""
    places = set()
    for byte in range(128):
        for side in range(2):
            feature = byte // group * 2 * group + side * group + byte % group  # as `pack_int4` pairs groups
            lane, step, at = byte // 32, byte % 32 // 4, byte % 4
            assert feature == column_features(group)[lane] + side * group + byte % 32
            for token in range(tokens):
                brick = ((side * 8 + step) * (tokens // 8) + token // 8) * 2 + at % 2
                place = place_of.fn(256 + feature, token, tokens, group)
                assert place == 256 * tokens + brick * 64 + token % 8 * 8 + 2 * lane + at // 2
                places.add(place)
    assert places == set(range(256 * tokens, 512 * tokens))


def test_each_number_of_tokens_has_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch, "supports", lambda x, feature: True)
    for module in (small_batch, large_batch):
        monkeypatch.setattr(module, "num_sms", lambda device: PROGRAMS)
    parts = fused_layer_of(1024, 1024, 2816, 1536, 128)
    assert [rows for rows in (1, 2, 3, 4, 33, 64, 65) if supports_fused_layer(parts, rows)] == [1, 2, 3, 4, 33, 64]
    assert [rows for rows in (1, 2, 3, 4, 33, 64, 65) if large_batch.supports_large_batch(parts, rows)] == [3, 4, 33, 64]


def test_scales_that_no_piece_begins_at_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch, "supports", lambda x, feature: True)
    layer = fused_layer_of(256, 256, 512, 256, 32)
    assert layer.down.weight is not None and layer.down.weight.scale is not None
    assert small_batch.is_uniform(layer) and small_batch.supports_small_batch(layer, 1)
    shape = layer.down.weight.scale.shape
    moved = torch.empty(shape.numel() + 1, dtype=torch.float16)[1:].view(shape)
    turned = torch.empty(shape[::-1], dtype=torch.float16).T
    for scale in (moved, turned):
        weight = replace(layer.down.weight, scale=scale)
        assert not small_batch.is_uniform(replace(layer, down=replace(layer.down, weight=weight)))
