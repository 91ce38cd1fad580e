"""Unpacks untrusted tar archives: only regular files, directories and links inside the folder, of limited size."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path
from typing import Any, Literal

from stoker.base.disk import is_of_disk
from stoker.base.errors import CheckpointError
from stoker.deploy.sources.store import Counter, Store, is_inside, without_single_parent

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
Mode = Literal["r:", "r:gz", "r:bz2", "r:xz"]
_MAGIC: dict[bytes, Mode] = {b"\x1f\x8b": "r:gz", b"BZh": "r:bz2", b"\xfd7zXZ\0": "r:xz", b"\x5d\0\0": "r:xz"}
_MAX_HEADER = 1 << 20
# The filter exists since Python 3.11.4. _check_member is stricter and is used in all versions.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def is_archive(path: Path) -> bool:
    """Whether `path` is a file with the name of a tar archive."""
    return path.is_file() and path.name.lower().endswith(_SUFFIXES)


def is_archive_name(name: str) -> bool:
    """Whether a name or address has the suffix of a tar archive."""
    return name.lower().endswith(_SUFFIXES)


def unpack(path: Path, digest: str | None, store: Store) -> Path:
    """Unpack a local archive into a directory of the store, which is keyed by its digest.

    Raises CheckpointError if `digest` is given and differs.
    """
    actual = sha256(path)
    check_digest(str(path), actual, digest)
    return without_single_parent(store.get("archives", actual, lambda folder: extract(path, folder, store)))


def check_digest(name: str, actual: str, expected: str | None) -> None:
    """Raise CheckpointError when a digest is expected and differs from the actual one."""
    if expected is not None and actual != expected.lower():
        raise CheckpointError(f"{name} has sha256 {actual}, not {expected.lower()}.", cure="Fetch it again, or correct the digest.")


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
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
        if is_of_disk(error):
            raise
        raise CheckpointError(f"{path} cannot be unpacked: {_reason(error)}.", cure="Create or fetch the archive again.") from None


def _mode(path: Path) -> Mode:
    """The mode for tarfile, found from the first bytes of the file.

    tarfile's own detection treats about one in a thousand compressed files as uncompressed.
    """
    with path.open("rb") as file:
        start = file.read(6)
    return next((mode for magic, mode in _MAGIC.items() if start.startswith(magic)), "r:")


def _extract_all(tar: tarfile.TarFile, path: Path, folder: Path, store: Store) -> None:
    """Extract all members, after checking each one and the limits."""
    counter = Counter(path.name, None, store.progress)
    total = 0
    for number, member in enumerate(tar, 1):
        total += member.size
        store.check_size(str(path), total, number)
        _check_member(member, path)
        tar.extract(member, folder, set_attrs=False, **_FILTER)  # without modes and owners
        counter.add(member.size)


def _check_member(member: tarfile.TarInfo, path: Path) -> None:
    """Raise CheckpointError for a member outside the folder. This is stricter than tarfile's data filter: .. is never allowed."""
    if member.islnk() or member.issym():
        if not (is_inside(member.name) and is_inside(member.linkname)):
            text = f"{path}: the link {member.name!r} → {member.linkname!r} may point outside the folder."
            raise CheckpointError(text, cure="Create the archive with tar -h.")
    elif not (member.isfile() or member.isdir()):
        raise CheckpointError(f"{path}: {member.name!r} is a device or pipe.", cure="Remove it from the archive.")
    elif not is_inside(member.name) and member.name not in (".", "./"):
        raise CheckpointError(f"{path}: {member.name!r} is outside the folder.", cure="Create the archive inside its folder.")


class _BoundedInfo(tarfile.TarInfo):
    """Raises ReadError for extended headers above _MAX_HEADER bytes before tarfile reads them into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if self.type in extended and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"an extended header has {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return member


def _reason(error: Exception) -> str:
    """The type and message of an error, shortened."""
    return f"{type(error).__name__}: {str(error)[:200]}"
