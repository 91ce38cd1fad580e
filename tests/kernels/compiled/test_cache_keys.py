"""The names under which Triton stores compiled kernels: a build and the starts after it compute the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Kernels that share helper functions, which use constants of their own modules.
NAMES = [
    "decode 1", "decode fp8", "prefill 80 wide", "rope fp8", "quant int4, 64 rows", "quant fp8, 1 rows",
    "experts int4 in groups of 32, float, 64 rows",
]  # fmt: skip


def test_keys_do_not_depend_on_what_was_compiled_before(uninterpreted: Callable[..., str]) -> None:
    script = Path(__file__).with_name("list_keys.py")
    forward, backward = (json.loads(uninterpreted(script, *names)) for names in (NAMES, NAMES[::-1]))
    assert all(forward.values()) and forward == backward
