"""The library of C kernels: compiled once, loaded only if undamaged and private, with the references as a fallback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native_cases import int8, needs_compiler
from oracle import relative_error

from stoker.base import env
from stoker.kernels import ops
from stoker.kernels.native import build, library
from stoker.kernels.types import PLAIN


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, in a process that has not loaded a library yet."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    forget()
    yield tmp_path / "native"
    forget()


def forget() -> None:
    library.load_kernels.cache_clear()
    ops._cpu.cache_clear()


def works() -> bool:
    run, weight = int8(8, 32)
    x = torch.randn(1, 32)
    exact = x.double() @ weight.t()
    return all(relative_error(found, exact) < 1e-4 for found in (run(x, None, PLAIN), ops.linear(x, weight.float())))


def test_disabled_by_the_environment(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_NATIVE", "0")
    assert library.kernels() == "turned off by STOKER_NATIVE"
    assert not ops._cpu() and works() and not fresh.exists()


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert str(library.kernels()).startswith("no C compiler")
    assert not ops._cpu() and works()


@needs_compiler
def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-nonsense",))
    assert "failed with status" in str(library.kernels()) and works()
    assert not list(fresh.iterdir())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library in a separate cache directory."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE", str(cache))
        return build.built_library()


@needs_compiler
def test_without_pytorchs_openmp_runtime(compiled: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir(mode=0o700)
    shutil.copy(compiled, fresh)

    def nothing() -> int:
        raise build.KernelsUnavailable("PyTorch's OpenMP runtime was not found")

    monkeypatch.setattr(library, "_gomp_parallel_address", nothing)
    assert "OpenMP" in str(library.kernels()) and works()


@needs_compiler
def test_a_library_is_private_and_compiled_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(compiled.parent.parent))
    assert (compiled.stat().st_mode & 0o777, compiled.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    monkeypatch.setattr(build, "_compiled", None)
    assert build.built_library() == compiled
    assert list(compiled.parent.iterdir()) == [compiled]


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_can_write_is_not_used(fresh: Path, mode: int) -> None:
    fresh.mkdir()
    fresh.chmod(mode)
    assert "is writable by other users" in str(library.kernels()) and works()


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_compiled_again(compiled: Path, fresh: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir(mode=0o700)
    content = compiled.read_bytes()
    broken = {"cut": content[: len(content) // 2], "changed": content[:-9] + b"x" + content[-8:], "empty": b""}[damage]
    path = fresh / compiled.name
    path.write_bytes(broken)
    path.chmod(0o700)

    def again(compiler: str, folder: Path, key: str) -> Path:
        return Path(shutil.copy(compiled, path))

    monkeypatch.setattr(build, "_compiled", again)
    assert not isinstance(library.kernels(), str) and path.read_bytes() == content


@needs_compiler
def test_the_key_depends_on_processor_compiler_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build._key("gcc 12"), build._key("gcc 13")}
    monkeypatch.setattr(build, "_processor", lambda: b"another")
    keys.add(build._key("gcc 12"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert len(keys | {build._key("gcc 12")}) == 4


@needs_compiler
def test_two_processes_compile_at_the_same_time(tmp_path: Path) -> None:
    program = """
import ctypes
from stoker.kernels.native import build
sources = build._sources
# Two files are compiled in a second or two, and all of them in seven.
build._sources = lambda pattern: [path for path in sources(pattern) if path.suffix != ".c" or path.stem in ("parallel", "attention")]
ctypes.CDLL(str(build.built_library()))
"""
    environment = env.child_environment(STOKER_CACHE=str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert len(list((tmp_path / "native").iterdir())) == 1
