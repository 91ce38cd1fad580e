"""The only reader of the process environment: every variable Stoker honours, with its default, in one table."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.base.errors import ConfigError

MAX_THREADS = 4096


def text(name: str, default: str = "") -> str:
    """The variable `name`, or `default` when it is unset or empty."""
    return os.environ.get(name) or default


def flag(name: str, default: bool = False) -> bool:
    """A boolean variable: 1, true, yes or on, without regard to case, is true."""
    value = os.environ.get(name)
    return default if not value else value.strip().lower() in ("1", "true", "yes", "on")


def cache_dir() -> Path:
    """Where built engines and compiled kernels are kept: STOKER_CACHE, else XDG_CACHE_HOME/stoker, else ~/.cache/stoker."""
    if explicit := text("STOKER_CACHE"):
        return Path(explicit)
    return Path(text("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"


def kernel_cache() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, else `kernels` of Stoker's cache."""
    return Path(text("TRITON_CACHE_DIR") or cache_dir() / "kernels")


def native() -> bool:
    """STOKER_NATIVE: whether the CPU's kernels in C are compiled and used. 0 leaves all to PyTorch."""
    return flag("STOKER_NATIVE", True)


def log_level() -> str:
    """STOKER_LOG: debug, info, warning or error."""
    return text("STOKER_LOG", "info").upper()


def hub_token() -> str | None:
    """The hub's access token: HF_TOKEN, else HUGGING_FACE_HUB_TOKEN. Never printed."""
    return text("HF_TOKEN") or text("HUGGING_FACE_HUB_TOKEN") or None


def commit() -> str | None:
    """STOKER_COMMIT: the source tree's commit, for results that are measured where there is no git."""
    return text("STOKER_COMMIT") or None


def num_threads() -> int:
    """CPU threads for arithmetic: STOKER_THREADS, else OMP_NUM_THREADS, else the cores this process may use. Raises ConfigError."""
    for name in ("STOKER_THREADS", "OMP_NUM_THREADS"):
        if value := text(name):
            return _count(name, value)
    return len(os.sched_getaffinity(0))


def _count(name: str, value: str) -> int:
    outermost = value.partition(",")[0].strip()  # OpenMP's lists have a number for each level of nesting
    if not (outermost.isascii() and outermost.isdigit() and len(outermost) < 5 and 0 < int(outermost) <= MAX_THREADS):
        raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use a whole number from 1 to {MAX_THREADS}, or unset it.")
    return int(outermost)


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment with `extra`, for a process it starts."""
    return {**os.environ, **extra}
