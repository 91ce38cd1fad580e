"""Which linears use the GEMM for many rows, and its tiles.

The kernel itself: emulator/emulate.py, tests/gpu/test_gpu_large_gemm.py, and compiled/ for its resources.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.aot.offline_target import compilation_target
from stoker.kernels.triton.gemm.large.launch import faster_tile, supports_digits, tiles_of_any_rows
from stoker.kernels.triton.gemm.large.tiles import (
    DIVIDED_TILE,
    MEDIUM_ROWS,
    MIN_OCCUPANCY,
    NARROW_TILE,
    SMALL_GATED_TILE,
    SMALL_TILE,
    SPLIT_TILE,
    TALL_TILE,
    TILE,
    LargeGemmTile,
    medium_tile,
    occupancy,
    sixteen_bit_tile,
    sixteen_bit_tiles,
    split_tiles,
)
from stoker.kernels.triton.gemm.quantized import fp8, int8
from stoker.kernels.triton.gemm.quantized.tiles import one_round_tile
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.types import PLAIN, Fusion
from stoker.runtime.worker.aot_trace import EAGER_TOKENS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GATED = Fusion(gate="silu")


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def added(rows: int, n: int) -> Fusion:
    return Fusion(residual=meta(rows, n))


@pytest.mark.parametrize(
    ("x", "weight", "fusion", "expected"),
    [
        (meta(2048, 4096), meta(28672, 4096), GATED, True),
        (meta(2048, 4096), meta(4096, 4096), added(2048, 4096), True),
        (meta(2048, 4096, dtype=FP8), meta(4096, 4096, dtype=FP8), added(2048, 4096), True),
        (meta(2048, 4096), meta(4096, 4096), PLAIN, False),
        (meta(2048, 4096, dtype=FP8), meta(28672, 4096, dtype=FP8), GATED, False),  # measured: not faster in every shape
        (meta(2048, 28672), meta(8192, 28672), added(2048, 8192), False),  # the residual is too small a part
        (meta(32, 4096), meta(28672, 4096), GATED, False),
        (meta(2048, 8192)[:, :4096], meta(28672, 4096), GATED, True),
        (meta(2048, 4097)[:, :4096], meta(28672, 4096), GATED, False),  # rows begin at any multiple of two bytes
        (meta(2048, 4096), meta(4096, 4096), Fusion(residual=meta(2048, 8192)[:, :4096]), False),
        (meta(2048, 4096, dtype=torch.float32), meta(28672, 4096, dtype=torch.float32), GATED, False),
    ],
)
def test_which_linears_are_faster(x: Tensor, weight: Tensor, fusion: Fusion, expected: bool) -> None:
    with compilation_target(90):
        assert faster_tile(x, weight, fusion) == (TILE if expected else None)


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices_use_the_library(capability: int) -> None:
    with compilation_target(capability):
        assert faster_tile(meta(2048, 4096), meta(28672, 4096), GATED) is None


def test_the_last_round_of_tiles_must_use_most_sms() -> None:
    assert occupancy(2048, 4096, None, 132) == 256 / 264 > MIN_OCCUPANCY
    assert occupancy(1152, 4096, None, 132) == 144 / 264 < MIN_OCCUPANCY
    assert occupancy(1024, 7168, "silu", 132) == 448 / 528 < MIN_OCCUPANCY


@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "expected"),
    [
        (128, 8192, 4096, None, NARROW_TILE),
        (256, 6144, 4096, None, NARROW_TILE),
        (384, 6144, 4096, None, TALL_TILE),  # 144 narrow tiles take two rounds, 96 tall ones take one
        (512, 6144, 4096, None, TILE),  # and 144 tall ones take two, 96 wide ones take one
        (768, 4096, 14336, None, TALL_TILE),
        (769, 4096, 14336, None, TILE),
        (768, 6144, 4096, None, None),
        (256, 4096, 14336, None, SPLIT_TILE),  # 64 tiles
        (384, 4096, 14336, None, NARROW_TILE),  # the halves of 96 tiles would not run at the same time
        (256, 4096, 4096, None, NARROW_TILE),  # adding two slices takes longer than half of the features
        (512, 28672, 4096, None, None),  # the library is faster in several rounds, unless a gate is saved
        (256, 14336, 4096, "silu", TILE),
        (384, 14336, 4096, "silu", TILE),
        (512, 14336, 4096, "silu", None),
    ],
)
def test_tiles_of_medium_rows(m: int, n: int, k: int, gate: str | None, expected: LargeGemmTile | None) -> None:
    assert medium_tile(m, n, k, gate, 132) == expected


@pytest.mark.parametrize(
    ("rows", "expected"), [(64, None), (65, NARROW_TILE), (129, NARROW_TILE), (512, NARROW_TILE), (513, TALL_TILE), (1023, TILE)]
)
def test_fp8_rows_with_tiles_of_their_own(rows: int, expected: LargeGemmTile | None) -> None:
    with compilation_target(90):
        assert faster_tile(meta(rows, 4096, dtype=FP8), meta(4096, 4096, dtype=FP8), added(rows, 4096)) == expected


@pytest.mark.parametrize(
    ("m", "n", "k", "parts", "expected"),
    [
        (32, 14336, 4096, "g", None),
        (33, 14336, 4096, "g", SMALL_GATED_TILE),
        (64, 4096, 4096, "g", None),  # 32 tiles would not read as fast as all SMs can
        (64, 6144, 4096, "", SMALL_TILE),
        (64, 4096, 4096, "", None),
        (64, 4096, 4096, "r", None),
        (65, 6144, 4096, "", None),  # nothing is saved
        (65, 14336, 4096, "g", None),
        (128, 14336, 4096, "g", TILE),
        (192, 14336, 4096, "g", None),
        (256, 14336, 4096, "g", TILE),
        (384, 14336, 4096, "g", None),
        (448, 14336, 4096, "g", DIVIDED_TILE),
        (640, 14336, 4096, "g", DIVIDED_TILE),
        (768, 14336, 8192, "g", DIVIDED_TILE),
        (896, 14336, 4096, "g", TILE),  # six rounds, of which the last one has 124 tiles
        (1023, 14336, 4096, "g", TILE),
        (448, 4096, 4096, "r", NARROW_TILE),
        (640, 4096, 4096, "r", None),
        (768, 4096, 14336, "r", TALL_TILE),
        (896, 4096, 14336, "r", TILE),
        (448, 2880, 4096, "r", None),
        (448, 2880, 4096, "rb", NARROW_TILE),  # the library would need a kernel for the bias
        (128, 2880, 4096, "rb", None),
    ],
)
def test_tiles_of_sixteen_bits(m: int, n: int, k: int, parts: str, expected: LargeGemmTile | None) -> None:
    gate = "silu" if "g" in parts else None
    assert sixteen_bit_tile(m, n, k, gate, "r" in parts, "b" in parts, 132) == expected
    if m in MEDIUM_ROWS and expected is not None:
        assert expected in sixteen_bit_tiles(n, k, gate, "r" in parts, "b" in parts, 132)


def test_linears_of_16_bits_use_them() -> None:
    with compilation_target(90):
        assert faster_tile(meta(448, 4096), meta(28672, 4096), GATED) == DIVIDED_TILE
        assert faster_tile(meta(448, 4096), meta(2880, 4096), added(448, 2880)) is None
        assert faster_tile(meta(448, 4096), meta(2880, 4096), added(448, 2880), is_biased=True) == NARROW_TILE
        assert faster_tile(meta(448, 4096, dtype=torch.float32), meta(28672, 4096, dtype=torch.float32), GATED) is None
        assert set(tiles_of_any_rows(meta(100, 4096), meta(28672, 4096), GATED, False)) == {TILE, DIVIDED_TILE}
        assert set(tiles_of_any_rows(meta(100, 4096), meta(4096, 4096), added(100, 4096), False)) == {NARROW_TILE, TALL_TILE, TILE}
        assert not tiles_of_any_rows(meta(64, 4096), meta(28672, 4096), GATED, False)
        assert not tiles_of_any_rows(meta(100, 4096), meta(6144, 4096), PLAIN, False)
    with compilation_target(80):
        assert not tiles_of_any_rows(meta(100, 4096), meta(28672, 4096), GATED, False)


def linear_of(out: int, features: int, **settings: object) -> PackedWeight:
    settings = {"activations": "token", **settings}
    return PackedWeight("fp8", meta(out, features, dtype=FP8), meta(out, dtype=torch.float32), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (meta(256, 4096), linear_of(28672, 4096), True),
        (meta(64, 4096), linear_of(28672, 4096), False),
        (meta(512, 4096), linear_of(28672, 4096), False),  # four rounds: the library
        (meta(100, 576), linear_of(3072, 576), False),  # all tiles of the quantized kernel run at the same time
        (meta(256, 4096, dtype=torch.float16), linear_of(28672, 4096), False),  # the library supports bfloat16 only
        (meta(256, 4096), linear_of(28672, 4096, activations="none"), False),
        (meta(256, 4096), linear_of(28672, 4096, group_size=128, block_rows=128), False),
    ],
)
def test_which_linears_gate_their_output(x: Tensor, weight: PackedWeight, expected: bool) -> None:
    with compilation_target(90):
        assert fp8.gates_output(x, weight) is expected


def test_linears_of_other_devices_do_not_gate_their_output() -> None:
    with compilation_target(89):
        assert not fp8.gates_output(meta(256, 4096), linear_of(28672, 4096))


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("k", [4096, 8192])
def test_the_ahead_of_time_trace_has_all_tiles(k: int, gate: str | None) -> None:
    """Every tile of 65 to 1,023 rows is also that of a number of tokens of the trace, also where other kernels compute some numbers."""
    for n in range(512, 40000, 128):
        found = {rows: medium_tile(rows, n, k, gate, 132) for rows in MEDIUM_ROWS}
        quantized = {rows: one_round_tile(rows, n, k, gate is not None, 132, tuning_for("NVIDIA H200", 90)) for rows in MEDIUM_ROWS}
        used = {rows: quantized[rows] or found[rows] for rows in MEDIUM_ROWS}
        assert {used[rows] for rows in EAGER_TOKENS if rows in MEDIUM_ROWS} == set(used.values()), n


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (meta(768, 4096), meta(128256, 4096, dtype=torch.int8), True),
        (meta(128, 4096), meta(128256, 4096, dtype=torch.int8), False),
        (meta(4096, 4096), meta(128256, 4096, dtype=torch.int8), False),  # the weight is dequantized once for all rows
        (meta(768, 4096, dtype=torch.float32), meta(128256, 4096, dtype=torch.int8), False),
        (meta(768, 4096), meta(50257, 4096, dtype=torch.int8), False),  # rows of the output begin at any multiple of two bytes
        (meta(768, 4100), meta(128256, 4100, dtype=torch.int8), False),
        (meta(768, 1 << 18), meta(4096, 1 << 18, dtype=torch.int8), False),  # the sums of digits would not fit int32
    ],
)
def test_which_int8_linears_multiply_digits(x: Tensor, weight: Tensor, expected: bool) -> None:
    with compilation_target(90):
        assert supports_digits(x, weight) is expected
    with compilation_target(89):
        assert not supports_digits(x, weight)


@pytest.mark.parametrize(
    ("rows", "n", "expected"),
    [
        (129, 4096, "quantized"),  # 96 tiles
        (256, 4096, "quantized"),  # 128
        (257, 4096, "large"),
        (192, 6144, "large"),  # 144 tiles: two rounds, and one of 72 tiles
        (129, 28672, "large"),
        (129, 128256, "large"),
        (128, 128256, "quantized"),
        (2049, 4096, "library"),
    ],
)
def test_how_int8_linears_are_multiplied(rows: int, n: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"quantized_activation_linear": "quantized", "large_int8_linear": "large", "dequantized_linear": "library"}
    for name, way in ways.items():
        monkeypatch.setattr(int8, name, lambda *_, way=way: way)
    weight = PackedWeight("int8", meta(n, 4096, dtype=torch.int8), meta(n, dtype=torch.float32))
    with compilation_target(90):
        assert int8.packed_linear(meta(rows, 4096), weight) == expected


@pytest.mark.parametrize(
    ("tiles", "blocks", "max_slices", "expected"),
    [
        (64, 112, 8, (0, 2)),
        (16, 64, 8, (0, 8)),
        (24, 64, 8, (0, 5)),
        (24, 3, 8, (0, 3)),  # a slice has at least one block of features
        (24, 64, 2, (0, 2)),
        (672, 64, 8, (660, 8)),  # five whole rounds, and 12 tiles on 96 SMs
        (448, 64, 8, (396, 2)),
        (112, 64, 8, (112, 1)),  # two slices would take two rounds
        (264, 64, 8, (264, 1)),
    ],
)
def test_tiles_of_the_last_round_are_divided(tiles: int, blocks: int, max_slices: int, expected: tuple[int, int]) -> None:
    assert split_tiles(tiles, blocks, TILE._replace(max_slices=max_slices), 132) == expected
