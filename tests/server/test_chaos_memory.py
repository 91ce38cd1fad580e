"""How the chaos test (`benchmarks/chaos`) judges memory: a process that grows is found, and a new one that reaches its size is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from chaos.resources import AGE_S, Sampler, total_growth

SECONDS, REPLACING, MIDDLE = 300, 120, 150
MB = 1e6 / 1024  # in KiB


def growth(sizes: dict[str, Any]) -> float | None:
    """The result of a run of 5 minutes. `sizes`: the memory in MB of the process of each role as a function of the time and its age.

    The executor is replaced every 8 s in the first 40 % of the run.
    """
    sampler = Sampler(None)  # type: ignore[arg-type]
    for at in range(SECONDS):
        started = min(at, REPLACING) // 8 * 8
        ages = {("supervisor", 1): at, ("frontend", 2): at, ("executor", 3 + started): at - started}
        sampler.samples.append((float(at), {(role, pid): int(MB * sizes[role](at, age)) for (role, pid), age in ages.items()}))
    return total_growth(sampler.growth(MIDDLE, SECONDS))


STEADY = {"supervisor": lambda at, age: 30, "frontend": lambda at, age: 50, "executor": lambda at, age: 200 + 1.5 * min(age, AGE_S) / 60}


def test_executors_that_are_replaced_reach_their_size() -> None:
    assert growth(STEADY) == 0.0


@pytest.mark.parametrize(
    ("role", "size"),
    [
        ("supervisor", lambda at, age: 30 + 2 * min(at, REPLACING) / 60),  # with each restart
        ("supervisor", lambda at, age: 30 + 2 * at / 60),
        ("frontend", lambda at, age: 50 + 2 * at / 60),
        ("executor", lambda at, age: 200 + 2 * age / 60),
    ],
)
def test_a_process_that_grows_is_found(role: str, size: Any) -> None:
    found = growth({**STEADY, role: size})
    assert found is not None and 1.7 < found < 2.01


def test_a_short_run_is_not_judged() -> None:
    sampler = Sampler(None)  # type: ignore[arg-type]
    sampler.samples = [(float(at), {("supervisor", 1): 1000 * at}) for at in range(100)]
    assert total_growth(sampler.growth(50, 100)) is None
