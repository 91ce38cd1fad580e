"""Kernels that the interpreter cannot run (Gluon, and CTAs that wait for each other), on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FORMS = ["dense", "fp8", "bytes", "int4 int", "int4 float 64", "int4 none 32"]
OTHERS = [
    ["attention"], ["prompts"], ["prompt_blocks"], ["outliers"], ["rotation"], ["large_gemm"],
    ["grouped_gemm"], ["digits"], ["fp4_experts"], ["router"],
]  # fmt: skip


@pytest.mark.parametrize("what", [*OTHERS, *(["fused_layer", form] for form in FORMS)], ids=" ".join)
def test_on_an_emulated_device(what: list[str], uninterpreted: Callable[..., str]) -> None:
    """emulate.py asserts, and prints nothing."""
    assert not uninterpreted(Path(__file__).with_name("emulate.py"), *what)


@pytest.mark.parametrize(("form", "num_ranks"), [("fp8", 2), ("dense", 4)])
def test_ranks_on_emulated_devices(form: str, num_ranks: int, uninterpreted: Callable[..., str]) -> None:
    assert not uninterpreted(Path(__file__).with_name("emulate_ranks.py"), form, str(num_ranks))
