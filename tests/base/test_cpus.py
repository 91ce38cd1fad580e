"""The CPU quota of control groups, version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.base import cpus

V1 = "4:memory:/x\n3:cpu,cpuacct:/docker/a/b\n"
CASES: dict[str, tuple[str, dict[str, str], float | None]] = {
    "version 2": ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
    "no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "the smallest of all parents": (
        "0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, 1.5
    ),
    "a path of the host": ("0::/docker/0123\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 1": (V1, {"cpu/docker/a/b/cpu.cfs_quota_us": "50000", "cpu/docker/a/b/cpu.cfs_period_us": "100000"}, 0.5),
    "version 1, joint": (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "800000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 8.0),
    "version 1, no quota": (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "damaged": ("0::/\nnonsense\n\n", {"cpu.max": "a b c"}, None),
    "no period": ("0::/\n", {"cpu.max": "1000 0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_quota_of_a_group(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, files, expected = CASES[name]
    (tmp_path / "cgroup").write_text(proc)
    for path, text in files.items():
        file = tmp_path / "mount" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpus.cpu_quota(tmp_path / "cgroup", tmp_path / "mount") == expected
    monkeypatch.setattr(cpus, "_PROC", tmp_path / "cgroup")
    monkeypatch.setattr(cpus, "_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert cpus.num_cpus() == (6 if expected is None else max(1, min(6, int(expected))))


def test_without_control_groups(tmp_path: Path) -> None:
    assert cpus.cpu_quota(tmp_path / "none", tmp_path) is None
    assert cpus.num_cpus() >= 1
