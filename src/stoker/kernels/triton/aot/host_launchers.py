"""The host libraries that launch kernels.

Until Triton 3.6, a small C library parses the arguments of each list of argument types, and is built when a kernel with these types is
first launched. Here these libraries are built ahead of time from the types alone, several at once (0.3 s each). An engine does not carry
them, because to load one would run foreign code: they are built on the machine that loads the engine. Triton 3.7 and later have one library
for all kernels, and nothing is built here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
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
from stoker.base.cpus import num_cpus


class LaunchSignature(msgspec.Struct, frozen=True):
    """What determines a host library: the types of all arguments as Triton writes them, and how tensor descriptors are passed."""

    types: tuple[str | tuple[str, ...], ...]  # for a tuple argument, the types of its elements
    descriptors: str  # the kernel's `tensordesc_meta` as JSON

    @staticmethod
    def of(signature: dict[str, Any], metadata: dict[str, Any]) -> LaunchSignature:
        """The signature of a kernel from Triton's argument types and the metadata of the compiled kernel."""
        types = tuple(kind if isinstance(kind, str) else tuple(kind) for kind in signature.values())
        return LaunchSignature(types, msgspec.json.encode(metadata.get("tensordesc_meta")).decode())


def build_launchers(signatures: Iterable[LaunchSignature], cache: Path) -> None:
    """Build the host libraries of `signatures` in Triton's cache directory `cache`, in parallel. Existing ones are skipped.

    Triton's driver must be there first, because a host library keeps its type of tensor descriptors from the time when it was loaded, and
    rejects all others.
    """
    if driver.CudaDriver.is_active():
        triton.runtime.driver.active  # noqa: B018 - a property that creates the driver
    with ThreadPoolExecutor(num_cpus()) as pool:
        list(pool.map(lambda signature: build_launcher(signature, cache), set(signatures)))


def build_launcher(signature: LaunchSignature, cache: Path) -> None:
    """Build one library into `cache`.

    On a machine without a CUDA driver it is linked against an empty libcuda.so.1 and not loaded. Without a C compiler nothing is built,
    and the first launch reports it.
    """
    if not hasattr(driver, "make_launcher"):
        return  # Triton 3.7 and later
    types, descriptors = dict(enumerate(signature.types)), msgspec.json.decode(signature.descriptors)
    if shutil.which(_compiler()) is None or _is_built(driver.make_launcher({}, types, descriptors), cache):
        return
    try:
        driver.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        triton.knobs.nvidia.libcuda_path = str(_empty_driver(cache))
    source = SimpleNamespace(constants={}, signature=types)
    with contextlib.suppress(ImportError):  # Triton loads what it built, which fails without a driver
        driver.CudaLauncher(source, SimpleNamespace(tensordesc_meta=descriptors, **_UNUSED_METADATA))


def _is_built(source: str, cache: Path) -> bool:
    """Whether `cache` holds the library that `triton.runtime.build` would compile from this C source."""
    key = hashlib.sha256((source + platform_key()).encode()).digest()
    return any((cache / base64.b32encode(key).decode().rstrip("=")).glob("__triton_launcher*.so"))


# Metadata that CudaLauncher reads from a kernel and stores in the Python object, not in the library.
_UNUSED_METADATA = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}


def _compiler() -> str:
    """The name of the C compiler that Triton uses."""
    return env.text("CC", "gcc")


def _empty_driver(cache: Path) -> Path:
    """A folder with a libcuda.so.1 that defines no symbol, to link against."""
    folder = cache / "without-driver"
    library = folder / "libcuda.so.1"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{uuid.uuid4().hex}")
        command = [_compiler(), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True)
        fresh.replace(library)
    return folder
