"""Representative launches on other devices than sm_90: they compile, fit into shared memory and use no instruction of sm_90 alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.kernels.triton.device import REQUIREMENTS

pytestmark = pytest.mark.slow

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 100: 227 << 10}  # of one CTA, CUDA C++ Programming Guide, compute capabilities
# Triton has no e4m3 conversion for sm_80, so FP8 engines need sm_89.
WITHOUT_A_KERNEL = {80: {"quant fp8, 32 rows"}, 89: set(), 100: set()}


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_representative_launches_compile_and_fit(capability: int, uninterpreted: Callable[..., str]) -> None:
    printed = uninterpreted(Path(__file__).with_name("compile_other_devices.py"), str(capability))
    launches = [json.loads(line) for line in printed.splitlines()]
    assert len(launches) > 10
    assert {launch["launch"] for launch in launches if "problem" in launch} == WITHOUT_A_KERNEL[capability]
    for launch in launches:
        assert "wgmma" not in launch.get("instructions", []), launch
        assert capability >= 90 or "griddepcontrol" not in launch.get("instructions", []), launch
        assert max(launch.get("shared_bytes", [0])) <= SHARED_BYTES[capability], launch


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_only_sm_90_meets_the_requirements_of_sm_90_kernels(capability: int) -> None:
    met = {name for name, requirement in REQUIREMENTS.items() if requirement.is_met(capability)}
    assert met == ({"pdl", "bf16x2_arithmetic"} if capability >= 90 else set())
    assert all(requirement.is_met(90) for requirement in REQUIREMENTS.values())
