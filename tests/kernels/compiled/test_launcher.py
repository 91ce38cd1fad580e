"""`kernels.triton.launcher` launches what Triton's own `JITFunction.run` launches, with the same arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def test_launches_are_those_of_triton(uninterpreted: Callable[..., str]) -> None:
    expected, found, by_triton = json.loads(uninterpreted(Path(__file__).with_name("record_launches.py")))
    assert found == expected
    assert len({launch[0] for launch in expected}) > 30, "the cases have many specializations"
    assert set(by_triton) == {"mixed_kernel"}, "only launches whose constants are not the last parameters are left to Triton"
