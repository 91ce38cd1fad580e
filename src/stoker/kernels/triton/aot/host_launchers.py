"""The host libraries of launches: Triton builds one with the C compiler for each list of argument types, when it is first launched.

They are built ahead here, several at once (0.3 s each), from the types alone. An engine never carries one: loading it would run
foreign code.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import triton
from triton.backends.nvidia import driver
from triton.runtime.build import platform_key

from stoker.base import env


class Launch(msgspec.Struct, frozen=True):
    """What decides a host library: the types of all arguments as Triton writes them, and how tensor descriptors are passed."""

    types: tuple[str | tuple[str, ...], ...]  # of an argument that is a tuple, those of its parts
    descriptors: str  # JSON

    @staticmethod
    def of(signature: dict[str, str | list[str]], metadata: dict[str, Any]) -> Launch:
        types = tuple(kind if isinstance(kind, str) else tuple(kind) for kind in signature.values())
        return Launch(types, msgspec.json.encode(metadata.get("tensordesc_meta")).decode())


def build_all(launches: Iterable[Launch], cache: Path) -> None:
    """Build what Triton's cache directory, `cache`, does not have."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda launch: build(launch, cache), set(launches)))


def build(launch: Launch, cache: Path) -> None:
    """Build one library. Without a driver here it is linked against an empty one, and is not loaded; without a compiler there is none,
    which a launch will tell."""
    types, descriptors = dict(enumerate(launch.types)), msgspec.json.decode(launch.descriptors)
    if shutil.which(_compiler()) is None or _is_built(driver.make_launcher({}, types, descriptors), cache):
        return
    try:
        driver.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        triton.knobs.nvidia.libcuda_path = str(_empty_driver(cache))
    source = SimpleNamespace(constants={}, signature=types)
    with contextlib.suppress(ImportError):
        driver.CudaLauncher(source, SimpleNamespace(tensordesc_meta=descriptors, **_NOTHING))


def _is_built(source: str, cache: Path) -> bool:
    """By the digest that `triton.runtime.build` gives a library: on a machine without a driver it could not be loaded to see."""
    key = hashlib.sha256((source + platform_key()).encode()).digest()
    return any((cache / base64.b32encode(key).decode().rstrip("=")).glob("__triton_launcher*.so"))


# What a launcher keeps of its kernel, and does not build in.
_NOTHING = {
    "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
    "launch_cooperative_grid": False, "launch_pdl": False,
}  # fmt: skip


def _compiler() -> str:
    return env.text("CC", "gcc")


def _empty_driver(cache: Path) -> Path:
    """A folder with a libcuda.so.1 that has its name and nothing in it."""
    folder = cache / "without-driver"
    library = folder / "libcuda.so.1"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{uuid.uuid4().hex}")
        command = [_compiler(), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True)
        fresh.replace(library)
    return folder
