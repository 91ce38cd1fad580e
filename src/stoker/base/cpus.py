"""The number of CPUs that this process may use: those of its affinity mask, up to the quota of its control group.

A container with a quota (`docker run --cpus 2`, a Kubernetes limit) sees all CPUs of the machine. With a thread on each of them it uses its
quota up early in each period, and is suspended for the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def num_cpus() -> int:
    """The CPUs of the affinity mask, or the whole CPUs of the smallest quota if they are fewer; at least 1.

    A fraction is left out: when one thread of a team is suspended, the others wait for it.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, int(cpu_quota(_PROC, _MOUNT) or allowed)))


def cpu_quota(proc: Path, mount: Path) -> float | None:
    """The smallest quota, in CPUs, of the control group that the file `proc` names and of its parents; None without one.

    `mount` is the folder of the control groups, of version 1 or 2 (cgroups(7)).
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for quota in _quotas(line, mount)]
    return min(quotas, default=None)


def _quotas(line: str, mount: Path) -> Iterator[float]:
    """The quotas of the groups in a line `number:controllers:path`. In a container the path may be that of the host, and not exist."""
    number, controllers, path = [*line.split(":", 2), "", ""][:3]
    relative = Path(path.lstrip("/"))
    groups = [relative, *relative.parents]
    if number == "0" and not controllers:
        for group in groups:
            yield from _ratio(_words(mount / group / "cpu.max"))
    elif "cpu" in controllers.split(","):
        for folder in _V1_FOLDERS:
            for group in groups:
                at = mount / folder / group
                yield from _ratio(_words(at / "cpu.cfs_quota_us") + _words(at / "cpu.cfs_period_us"))


def _words(file: Path) -> list[str]:
    """The words of a file; none if it cannot be read."""
    try:
        return file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _ratio(words: list[str]) -> Iterator[float]:
    """Quota ÷ period in microseconds, unless there is no quota (`max` or -1)."""
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[0]) and int(words[1]):
        yield int(words[0]) / int(words[1])
