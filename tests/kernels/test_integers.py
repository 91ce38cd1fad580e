"""The integer arithmetic of launchers equals Triton's."""

from __future__ import annotations

import triton

from stoker.kernels.triton.integers import cdiv, next_power_of_2


def test_results_are_those_of_triton() -> None:
    sizes = [*range(70), 127, 128, 129, 4095, 4096, 4097, (1 << 40) - 1, 1 << 40]
    assert [next_power_of_2(n) for n in sizes] == [triton.next_power_of_2(n) for n in sizes]
    assert all(cdiv(x, y) == triton.cdiv(x, y) for x in sizes for y in sizes if y)
