"""Fetches archives over http(s) and checks their digest before they are opened."""

from __future__ import annotations

import hashlib
import re
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO

from stoker.base.disk import is_of_disk
from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy.sources import archive
from stoker.deploy.sources.store import Counter, Store, without_single_parent

_BLOCK = 1 << 20
_TIMEOUT_S = 60


def fetch(address: str, digest: str | None, store: Store) -> Path:
    """Download the tar archive at `address`, and unpack it into a directory of the store, which is keyed by its digest.

    The sha256 is `digest` or #sha256=HEX in the address. Raises ConfigError for an address without one, CheckpointError for an archive that
    cannot be fetched, is truncated, or has another digest.
    """
    address, digest = _split(address, digest)
    if not archive.is_archive_name(address.partition("?")[0]):
        raise ConfigError(f"{address} does not end in .tar, .tar.gz, .tgz, .tar.bz2 or .tar.xz.", cure="Name a tar archive.")
    return without_single_parent(store.get("archives", digest, lambda folder: _download(address, digest, folder, store)))


def _split(address: str, digest: str | None) -> tuple[str, str]:
    """(address without fragment, digest). Raises ConfigError without a digest or with two different ones."""
    bare, _, fragment = address.partition("#")
    in_address = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else None
    if digest and in_address and digest.lower() != in_address:
        raise ConfigError(f"{bare}: there are two digests, {digest} and {in_address}.", cure="Keep one.")
    chosen = (digest or in_address or "").lower()
    if not re.fullmatch("[0-9a-f]{64}", chosen):
        raise ConfigError(f"{bare}: an archive from the network needs its sha256.", cure="Append #sha256=HEX to the address.")
    return bare, chosen


def _download(address: str, digest: str, folder: Path, store: Store) -> None:
    """Download the archive, check its digest, and unpack it into `folder`."""
    with tempfile.TemporaryDirectory(dir=store.root) as scratch:
        part = Path(scratch) / "download"
        try:
            actual = _get(address, part, store)
        except (urllib.error.URLError, HTTPException, OSError) as error:
            if is_of_disk(error):
                raise
            cure = "Check the address and the network, or name a local file."
            raise CheckpointError(f"{address} cannot be fetched: {_reason(error)}.", cure=cure) from None
        archive.check_digest(address, actual, digest)
        archive.extract(part, folder, store)


def _get(address: str, part: Path, store: Store) -> str:
    """Download to the file `part`, and return the sha256."""
    request = urllib.request.Request(address, headers={"User-Agent": "stoker"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        length = response.headers.get("Content-Length", "")
        return _copy(response, part, address, int(length) if length.isdigit() else None, store)


def _copy(response: IO[bytes], part: Path, address: str, length: int | None, store: Store) -> str:
    """Write the response's body to the file `part`, up to the size limit, and return its sha256. Raises CheckpointError."""
    store.check_size(address, length or 0)
    counter, num_bytes, sha = Counter(address, length, store.progress), 0, hashlib.sha256()
    with part.open("wb") as file:
        while block := response.read(_BLOCK):
            num_bytes += len(block)
            if num_bytes > store.max_bytes:
                store.check_size(address, num_bytes)
            sha.update(block)
            file.write(block)
            counter.add(len(block))
    if length is not None and num_bytes != length:
        raise CheckpointError(f"{address} is truncated: {num_bytes} of {length} bytes were received.", cure="Try again.")
    return sha.hexdigest()


def _reason(error: Exception) -> str:
    """The reason of a failed download, for messages."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server responded with status {error.code}"
    return str(getattr(error, "reason", "") or error or type(error).__name__)[:200]
