"""Unpacks tar archives from strangers: nothing leaves the folder, nothing is larger than it says, nothing special is made."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path
from typing import Any, Literal

from stoker.base.errors import CheckpointError
from stoker.deploy.sources.store import Counter, Store, inside, unwrapped

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
Mode = Literal["r:", "r:gz", "r:bz2", "r:xz"]
_MAGIC: dict[bytes, Mode] = {b"\x1f\x8b": "r:gz", b"BZh": "r:bz2", b"\xfd7zXZ\0": "r:xz", b"\x5d\0\0": "r:xz"}
_MAX_HEADER = 1 << 20
# Python 3.11.4 brought the filter. Before it _check_member stands alone, and it is the stricter of the two.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def recognise(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(_SUFFIXES)


def is_name(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def unpack(path: Path, digest: str | None, store: Store) -> Path:
    """The directory that a local archive holds, kept by its content. Raises CheckpointError for another digest than `digest`."""
    found = sha256(path)
    check_digest(str(path), found, digest)
    return unwrapped(store.keep("archives", found, lambda folder: extract(path, folder, store)))


def check_digest(what: str, found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted.lower():
        raise CheckpointError(f"{what} has sha256 {found}, not {wanted.lower()}.", cure="Fetch it again, or correct the digest.")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(path: Path, folder: Path, store: Store) -> None:
    """Unpack the archive at `path` into the empty `folder`.

    Raises CheckpointError for a name or link that leaves the folder, a device, too many or too large members, or a damaged archive.
    """
    try:
        with tarfile.open(path, _mode(path), tarinfo=_BoundedInfo) as tar:
            _extract_all(tar, path, folder, store)
    except (tarfile.TarError, EOFError, zlib.error, LZMAError, OSError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be unpacked: {_reason(error)}.", cure="Make or fetch the archive again.") from None


def _mode(path: Path) -> Mode:
    """How tarfile reads it, by its first bytes: left to try, it takes some compressed file in a thousand for a plain archive."""
    with path.open("rb") as file:
        start = file.read(6)
    return next((mode for magic, mode in _MAGIC.items() if start.startswith(magic)), "r:")


def _extract_all(tar: tarfile.TarFile, path: Path, folder: Path, store: Store) -> None:
    counter = Counter(path.name, None, store.progress)
    total = 0
    for number, member in enumerate(tar, 1):
        total += member.size
        store.check_size(str(path), total, number)
        _check_member(member, path)
        tar.extract(member, folder, set_attrs=False, **_FILTER)  # modes and owners are not taken over
        counter.add(member.size)


def _check_member(member: tarfile.TarInfo, path: Path) -> None:
    """Stricter than the data filter: no .. anywhere, not even where it would come back into the folder."""
    if member.islnk() or member.issym():
        if not (inside(member.name) and inside(member.linkname)):
            text = f"{path}: the link {member.name!r} → {member.linkname!r} may leave the folder."
            raise CheckpointError(text, cure="Make the archive with tar -h.")
    elif not (member.isfile() or member.isdir()):
        raise CheckpointError(f"{path}: {member.name!r} is a device or pipe.", cure="Remove it from the archive.")
    elif not inside(member.name) and member.name not in (".", "./"):
        raise CheckpointError(f"{path}: {member.name!r} leaves the folder.", cure="Make the archive from inside its folder.")


class _BoundedInfo(tarfile.TarInfo):
    """Refuses extended headers of absurd size before tarfile reads them into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if self.type in extended and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"an extended header has {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
