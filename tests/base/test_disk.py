"""Errors of a full disk name the path: of the build, of the cache of models, of the kernel cache. They are raised by a real small disk."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.base.disk import is_of_disk, names_path
from stoker.deploy.sources import archive
from stoker.deploy.sources.store import Store
from stoker.engine.publish import workspace

SIZE = 64 << 10


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_build_names_its_output(full_disk: Path) -> None:
    out = full_disk / "engine"
    with pytest.raises(OSError, match="No space left") as caught, workspace(out) as work, (work / "rank0.safetensors").open("wb") as file:
        file.write(bytes(2 * SIZE))
    assert caught.value.filename == str(out) and list(full_disk.iterdir()) == []


def test_the_cache_names_its_folder(full_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(2 * SIZE))
    with tarfile.open(tmp_path / "model.tar", "w") as tar:
        tar.add(tmp_path / "model.bin", "model.bin")
    store = Store(full_disk, 1 << 30, lambda *_: None)
    store.check_size = lambda *_: None  # type: ignore[method-assign]  # the disk fills after the check
    with pytest.raises(OSError, match="No space left") as caught:
        store.get("archives", "model", lambda folder: archive.extract(tmp_path / "model.tar", folder, store))
    assert str(full_disk / "archives") in str(caught.value)


def test_other_errors_are_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, names_path(tmp_path):
        (tmp_path / "absent").read_bytes()
    assert caught.value.filename == str(tmp_path / "absent") and not is_of_disk(caught.value)
