"""`kernels.triton.launcher` launches what Triton's own `JITFunction.run` launches, with the same arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def test_launches_are_those_of_triton(uninterpreted: Callable[..., str]) -> None:
    expected, found, by_triton = json.loads(uninterpreted(Path(__file__).with_name("record_launches.py")))
    assert found == expected
    assert len({launch[0] for launch in expected}) > 30, "the cases have many specializations"
    assert set(by_triton) == {"mixed_kernel", "named_kernel"}, "only constants that are not the last are left to Triton"


def test_all_kernels_are_launched_as_by_triton(uninterpreted: Callable[..., str]) -> None:
    different, by_triton = json.loads(uninterpreted(Path(__file__).with_name("record_all_launches.py")))
    assert different == []
    assert by_triton == ["fused_layer_small_batch_kernel"], "it takes runtime arguments by name"
