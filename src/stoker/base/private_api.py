"""The private or undocumented parts of other packages that Stoker uses, and a check that the installed versions have these parts.

Such a part may change in any release. A package of Stoker that uses one calls `check_private_api` in its `__init__`, before the imports
that need it, so an unsupported version is reported at start-up, in one line, and not by the first request. The check reads attributes of
modules that are imported anyway; it takes less than a millisecond.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import NamedTuple

from stoker.base.errors import UnsupportedVersionError


class VersionRange(NamedTuple):
    """The lowest and the highest version that tests ran with (`make bounds`). The lowest is the bound in pyproject.toml."""

    lowest: str
    highest: str


class PrivateAPI(NamedTuple):
    """Attributes of a module that Stoker uses. The package `used_by` of Stoker checks in its `__init__` that they exist."""

    package: str  # the name that pip uses
    module: str
    attributes: tuple[str, ...]  # dotted: of the module, or of a class in it
    used_by: str
    reason: str


TESTED = {
    "uvicorn": VersionRange("0.45", "0.54.0"),
    "starlette": VersionRange("0.46", "1.10.0"),
    "torch": VersionRange("2.13.0", "2.13.0"),
    "triton": VersionRange("3.6", "3.9.0"),
}

PRIVATE_APIS = (
    PrivateAPI(
        "uvicorn",
        "uvicorn.protocols.http.httptools_impl",
        (
            "HEADER_RE", "HEADER_VALUE_RE", "STATUS_LINE", "RequestResponseCycle.run_asgi", "RequestResponseCycle.receive",
            "HttpToolsProtocol._unset_keepalive_if_required", "HttpToolsProtocol._start_asgi_task",
            "HttpToolsProtocol.on_response_complete", "HttpToolsProtocol.send_400_response",
        ),
        "stoker.server.http",
        "limits on request heads, and responses in as few writes as possible",
    ),
    PrivateAPI(
        "uvicorn",
        "uvicorn",
        ("Server.capture_signals", "Server.startup"),
        "stoker.server.http",
        "signals are handled by Stoker's own processes, and connections are accepted by its own loop",
    ),
    PrivateAPI("starlette", "starlette.routing", ("compile_path",), "stoker.server.http", "the path syntax of routes"),
    PrivateAPI(
        "triton",
        "triton.runtime.jit",
        ("JITFunction.run", "DependenciesFinder._update_hash", "JITCallable.cache_key"),
        "stoker.kernels.triton",
        "cache keys that do not depend on the order in which kernels are hashed",
    ),
    PrivateAPI(
        "triton",
        "triton.runtime.jit",
        ("native_specialize_impl", "JITFunction.run", "JITFunction.__getitem__", "knobs.runtime.launch_enter_hook.calls",
         "knobs.runtime.launch_exit_hook.calls"),
        "stoker.kernels.triton",
        "launches with less work on the host",
    ),
    PrivateAPI(
        "triton",
        "triton.runtime.cache",
        ("get_cache_key",),
        "stoker.kernels.triton.aot",
        "kernels are compiled under the names that a launch looks up",
    ),
    PrivateAPI(
        "triton",
        "triton",
        ("knobs.runtime", "knobs.cache", "knobs.compilation", "compiler.make_backend", "compiler.ASTSource", "runtime.driver"),
        "stoker.kernels.triton.aot",
        "kernels are compiled without a GPU, into a cache of Stoker's own",
    ),
    PrivateAPI(
        "triton",
        "triton.experimental.gluon",
        ("jit", "language.inline_asm_elementwise", "language.allocate_shared_memory", "language.BlockedLayout"),
        "stoker.kernels.triton.ptx",
        "kernels that manage their shared memory themselves",
    ),
    PrivateAPI(
        "triton",
        "triton.experimental.gluon.language",
        ("warp_specialize", "NVMMASharedLayout", "NVMMADistributedLayout", "nvidia.hopper.warpgroup_mma", "nvidia.hopper.tma.store_wait",
         "nvidia.hopper.mbarrier.expect"),
        "stoker.kernels.triton.ptx",
        "the GEMM for many rows",
    ),
    PrivateAPI(
        "torch",
        "torch",
        ("_int_mm", "_scaled_mm", "_weight_int4pack_mm_for_cpu", "ops.aten._convert_weight_to_int4pack_for_cpu"),
        "stoker.kernels.reference",
        "products of int8, FP8 and int4 weights",
    ),
    PrivateAPI(
        "torch",
        "torch.distributed._symmetric_memory",
        ("empty", "rendezvous", "_SymmetricMemory.get_buffer", "_SymmetricMemory.put_signal", "_SymmetricMemory.wait_signal"),
        "stoker.distributed.symmetric",
        "all-reduces through the memory of peer GPUs",
    ),
    PrivateAPI(
        "torch",
        "torch._subclasses.fake_tensor",
        ("FakeTensorMode",),
        "stoker.engine.pickled_tensors",
        "the shapes of a .bin file are read without its data",
    ),
)  # fmt: skip


def check_private_api(used_by: str) -> None:
    """Check that the parts used by one package or module of Stoker exist. Raises UnsupportedVersionError."""
    for row in PRIVATE_APIS:
        if row.used_by == used_by:
            missing = _missing_part(row)
            if missing is not None:
                raise UnsupportedVersionError(row.package, _installed_version(row.package), *TESTED[row.package], f"has no {missing}")


def _missing_part(row: PrivateAPI) -> str | None:
    """The first module or attribute that does not exist, or None."""
    try:
        module = importlib.import_module(row.module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(row.package):
            raise
        return row.module
    for name in row.attributes:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            return f"{row.module}.{name}"
    return None


def _installed_version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"
