"""Which linears use the GEMM for many rows. The kernel itself: tests/gpu/test_gpu_large_gemm.py, and compiled/ for its resources."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels.triton.aot.offline_target import compilation_target
from stoker.kernels.triton.gemm.large.launch import MIN_OCCUPANCY, MIN_ROWS, is_faster, occupancy
from stoker.kernels.types import PLAIN, Fusion

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
        (meta(MIN_ROWS - 1, 4096), meta(28672, 4096), GATED, False),
        (meta(2048, 8192)[:, :4096], meta(28672, 4096), GATED, True),
        (meta(2048, 4097)[:, :4096], meta(28672, 4096), GATED, False),  # rows begin at any multiple of two bytes
        (meta(2048, 4096), meta(4096, 4096), Fusion(residual=meta(2048, 8192)[:, :4096]), False),
        (meta(2048, 4096, dtype=torch.float32), meta(28672, 4096, dtype=torch.float32), GATED, False),
    ],
)
def test_which_linears_are_faster(x: Tensor, weight: Tensor, fusion: Fusion, expected: bool) -> None:
    with compilation_target(90):
        assert is_faster(x, weight, fusion) is expected


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices_use_the_library(capability: int) -> None:
    with compilation_target(capability):
        assert not is_faster(meta(2048, 4096), meta(28672, 4096), GATED)


def test_the_last_round_of_tiles_must_use_most_sms() -> None:
    assert occupancy(2048, 4096, None, 132) == 256 / 264 > MIN_OCCUPANCY
    assert occupancy(1152, 4096, None, 132) == 144 / 264 < MIN_OCCUPANCY
    assert occupancy(1024, 7168, "silu", 132) == 448 / 528 < MIN_OCCUPANCY
