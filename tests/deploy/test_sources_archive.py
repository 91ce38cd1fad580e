"""Local paths and untrusted tar archives as sources."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy.sources import resolve
from stoker.deploy.sources.store import Store, is_inside


def tar_of(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_directories_and_weight_files_are_used_in_place(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.touch()
    assert resolve(str(tmp_path), cache=tmp_path / "c") == tmp_path
    assert resolve(str(weights), cache=tmp_path / "c") == weights
    assert not (tmp_path / "c").exists()


def test_existing_directory_takes_precedence_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == tmp_path / "org" / "model"


@pytest.mark.parametrize("location", ["/no/such/dir", "./nothing", "a/b/c", "~/no-such-directory-here"])
def test_missing_paths(location: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(location, cache=tmp_path)


INVALID = ["org/..", "a b", "org/mo--del", "gs://bucket/x", "ftp://host/x.tar", "file:///etc/passwd", "hf://a/b/c", "s3://"]


@pytest.mark.parametrize("location", INVALID)
def test_invalid_addresses(location: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        resolve(location, cache=tmp_path)


def test_file_that_is_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").touch()
    with pytest.raises(CheckpointError, match="neither a directory nor a tar"):
        resolve(str(tmp_path / "weights.txt"), cache=tmp_path)


@pytest.mark.parametrize("name", ["model.tar.gz", "model.tar"])
def test_archive_is_unpacked_once(tmp_path: Path, name: str) -> None:
    path = tar_of(tmp_path / name, ("model/config.json", b"{}"), ("model/sub/weights.bin", b"12"))
    done: list[int] = []
    folder = resolve(str(path), cache=tmp_path / "c", progress=lambda name, count, total: done.append(count))
    assert files(folder) == {"config.json": b"{}", "sub/weights.bin": b"12"}
    assert folder.name == "model" and done == [2, 4]
    stamp = folder.stat().st_mtime_ns
    assert resolve(str(path), cache=tmp_path / "c") == folder and folder.stat().st_mtime_ns == stamp


def test_digest_of_a_local_archive(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "m.tar", ("a", b"1"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert files(resolve(str(path), cache=tmp_path / "c", digest=digest.upper())) == {"a": b"1"}
    with pytest.raises(CheckpointError, match=f"has sha256 {digest}, not 00"):
        resolve(str(path), cache=tmp_path / "c", digest="00" * 32)


HOSTILE: dict[str, Any] = {
    "parent": ("../outside", b"x"),
    "parent inside": ("a/../../outside", b"x"),
    "parent that returns into the folder": ("a/../b", b"x"),
    "absolute": ("/tmp/outside", b"x"),
    "backslash": ("..\\outside", b"x"),
    "drive": ("C:\\outside", b"x"),
    "link out": special("link", tarfile.SYMTYPE, "../outside"),
    "link to root": special("link", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link out": special("link", tarfile.LNKTYPE, "../outside"),
    "device": special("null", tarfile.CHRTYPE),
    "block device": special("disk", tarfile.BLKTYPE),
    "pipe": special("pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused_and_leave_nothing(tmp_path: Path, case: str) -> None:
    path = tar_of(tmp_path / "m.tar.gz", ("fine", b"1"), HOSTILE[case])
    with pytest.raises(CheckpointError, match=r"outside|device"):
        resolve(str(path), cache=tmp_path / "c")
    assert not (tmp_path / "outside").exists()
    assert files(tmp_path / "c").keys() <= {p for p in files(tmp_path / "c") if p.endswith(".lock")}


def test_link_inside_the_folder_is_unpacked(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "m.tar", ("weights", b"1"), special("alias", tarfile.SYMTYPE, "weights"))
    assert (resolve(str(path), cache=tmp_path / "c") / "alias").read_bytes() == b"1"


def test_sizes_are_limited(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "m.tar.gz", ("a", b"0" * 600), ("b", b"0" * 600))
    with pytest.raises(CheckpointError, match="the limit is"):
        resolve(str(path), cache=tmp_path / "c", max_bytes=1000)


def test_member_that_claims_more_than_the_disk(tmp_path: Path) -> None:
    info = tarfile.TarInfo("huge")
    info.size = 1 << 41
    path = tmp_path / "m.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(CheckpointError, match=r"free|cannot be unpacked"):
        resolve(str(path), cache=tmp_path / "c")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_huge_extended_header_is_not_read(tmp_path: Path, kind: bytes) -> None:
    info = special("header", kind)
    info.size = 1 << 33
    path = tmp_path / "m.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * (1 << 21)))
    with pytest.raises(CheckpointError, match="an extended header has"):
        resolve(str(path), cache=tmp_path / "c")


def test_a_compressed_archive_is_never_read_as_uncompressed(tmp_path: Path) -> None:
    """With some times in the gzip header, about one file in 300, tarfile would read the file as an uncompressed archive."""
    info = special("header", tarfile.GNUTYPE_LONGNAME)
    info.size = 1 << 33
    data = bytearray(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * (1 << 21)))
    path = tmp_path / "m.tar.gz"
    for time in range(1 << 16):
        data[4:8] = time.to_bytes(4, "little")
        with contextlib.suppress(tarfile.HeaderError):
            tarfile.TarInfo.frombuf(bytes(data[:512]), "utf-8", "surrogateescape")
            break
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="an extended header has"):
        resolve(str(path), cache=tmp_path / "c")


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.9])
def test_truncated_archive(tmp_path: Path, fraction: float) -> None:
    data = tar_of(tmp_path / "m.tar.gz", ("a", bytes(range(256)) * 40), ("b", b"x" * 9999)).read_bytes()
    (tmp_path / "m.tar.gz").write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CheckpointError, match=r"m.tar.gz cannot be unpacked"):
        resolve(str(tmp_path / "m.tar.gz"), cache=tmp_path / "c")


def test_other_content_with_the_name_of_an_archive(tmp_path: Path) -> None:
    (tmp_path / "m.tar.gz").write_bytes(b"not a tar" * 100)
    with pytest.raises(CheckpointError, match="cannot be unpacked"):
        resolve(str(tmp_path / "m.tar.gz"), cache=tmp_path / "c")


def test_ten_threads_create_one_entry(tmp_path: Path) -> None:
    filled: list[Path] = []
    barrier = threading.Barrier(10)
    found: list[Path] = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "a").write_bytes(b"1")

    def get() -> None:
        barrier.wait()
        found.append(Store(tmp_path, 1 << 30, lambda *report: None).get("kind", "identity", fill))

    threads = [threading.Thread(target=get) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1 and len(set(found)) == 1 and len(found) == 10


def test_failure_leaves_nothing_and_stale_folders_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, lambda *report: None)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise CheckpointError("truncated")

    with pytest.raises(CheckpointError):
        store.get("kind", "identity", fail)
    assert [p.suffix for p in (tmp_path / "kind").iterdir()] == [".lock"]
    lock = next((tmp_path / "kind").iterdir())
    (tmp_path / "kind" / f"{lock.stem}.partial-dead").mkdir()
    entry = store.get("kind", "identity", lambda folder: None)
    assert {p.name for p in (tmp_path / "kind").iterdir()} == {lock.name, entry.name}


INSIDE = {"a": True, "a/b": True, "..a": True, "": False, "..": False, "a/..": False, "/a": False, "a\0": False}


@pytest.mark.parametrize("name, safe", INSIDE.items())
def test_is_inside(name: str, safe: bool) -> None:
    assert is_inside(name) is safe
