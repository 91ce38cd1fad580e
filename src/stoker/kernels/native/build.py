"""The C sources as a shared library in Stoker's cache, compiled once per combination of sources, compiler and processor."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from stoker.base import env

COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)
TIMEOUT_S = 120.0
_SOURCES = Path(__file__).parent


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled or loaded on this machine. The message is the reason."""


def built_library() -> Path:
    """The path of the library for this machine. Compiles it unless the cache holds an undamaged copy. Raises KernelsUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C compiler: none of {', '.join(COMPILERS)} is installed")
    try:
        folder = _private_folder()
        key = _key(_output([compiler, "--version"]))
        return _cached(folder, key) or _compiled(compiler, folder, key)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(str(error)) from error


def _private_folder() -> Path:
    """The cache folder of libraries. Code is loaded from it, so KernelsUnavailable is raised if other users can write to it."""
    folder = env.cache_dir() / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise KernelsUnavailable(f"{folder} is writable by other users")
    return folder


def _is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user, is no symbolic link, and is not writable by group or others."""
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(compiler: str) -> str:
    """The first part of the library's file name: a digest of everything that its code depends on.

    These are the sources, flags, compiler, and the processor (-march=native).
    """
    parts = [source.read_bytes() for source in _sources("*.[ch]")]
    parts += [" ".join(FLAGS).encode(), compiler.encode(), repr((platform.machine(), platform.system(), platform.libc_ver())).encode()]
    return hashlib.sha256(b"\0".join([*parts, _processor()])).hexdigest()[:32]


def _sources(pattern: str) -> list[Path]:
    """The C source files that match a glob pattern, in a fixed order."""
    return sorted(_SOURCES.glob(pattern))


def _processor() -> bytes:
    """The model and features of the first CPU core, from /proc/cpuinfo where it exists."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor().encode()
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].partition(":")[0].strip() in names).encode()


def _cached(folder: Path, key: str) -> Path | None:
    """The path of the cached library, or None. It must be private (`_is_private`), and its name must end in the digest of its content."""
    for path in folder.glob(f"{key}-*.so"):
        if _is_private(path) and path.stem.rpartition("-")[2] == _digest(path):
            return path
    return None


def _digest(path: Path) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _compiled(compiler: str, folder: Path, key: str) -> Path:
    """Compile in a temporary folder and move the library into `folder`. Safe when several processes do so at the same time."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch) / "kernels.so"
        _output([compiler, *FLAGS, "-o", str(library), *map(str, _sources("*.c")), "-lm"])
        library.chmod(0o700)
        return library.replace(folder / f"{key}-{_digest(library)}.so")


def _output(command: list[str]) -> str:
    """Run a command of the compiler and return its standard output. Raises an error on a failure or a time-out."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env=env.child_environment(LC_ALL="C"),
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise KernelsUnavailable(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'without a message'}")
    return done.stdout
