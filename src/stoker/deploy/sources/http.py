"""Archives over http(s), checked against a digest before they are opened."""

from __future__ import annotations

import hashlib
import re
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO

from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy.sources import archive
from stoker.deploy.sources.store import Counter, Store, unwrapped

_BLOCK = 1 << 20
_TIMEOUT_S = 60


def fetch(address: str, digest: str | None, store: Store) -> Path:
    """The directory in the tar archive at `address`, kept by digest: no second download.

    The sha256 is given as `digest` or as #sha256=HEX. Raises ConfigError for an address without one, CheckpointError for what
    cannot be fetched, is cut short, or has another digest.
    """
    address, digest = _split(address, digest)
    if not archive.is_name(address.partition("?")[0]):
        raise ConfigError(f"{address} does not end in .tar, .tar.gz, .tgz, .tar.bz2 or .tar.xz.", cure="Name a tar archive.")
    return unwrapped(store.keep("archives", digest, lambda folder: _download(address, digest, folder, store)))


def _split(address: str, digest: str | None) -> tuple[str, str]:
    bare, _, fragment = address.partition("#")
    named = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else None
    if digest and named and digest.lower() != named:
        raise ConfigError(f"{bare}: two digests are given, {digest} and {named}.", cure="Keep one.")
    chosen = (digest or named or "").lower()
    if not re.fullmatch("[0-9a-f]{64}", chosen):
        raise ConfigError(f"{bare}: an archive from the network needs its sha256.", cure="Append #sha256=HEX to the address.")
    return bare, chosen


def _download(address: str, digest: str, folder: Path, store: Store) -> None:
    with tempfile.TemporaryDirectory(dir=store.root) as scratch:
        part = Path(scratch) / "download"
        try:
            found = _get(address, part, store)
        except (urllib.error.URLError, HTTPException, OSError) as error:
            cure = "Check the address and the network, or name a local file."
            raise CheckpointError(f"{address} cannot be fetched: {_reason(error)}.", cure=cure) from None
        archive.check_digest(address, found, digest)
        archive.extract(part, folder, store)


def _get(address: str, part: Path, store: Store) -> str:
    request = urllib.request.Request(address, headers={"User-Agent": "stoker"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        length = answer.headers.get("Content-Length", "")
        return _copy(answer, part, address, int(length) if length.isdigit() else None, store)


def _copy(answer: IO[bytes], part: Path, address: str, length: int | None, store: Store) -> str:
    """Write the body, bounded, and return its sha256."""
    store.check_size(address, length or 0)
    counter, seen, sha = Counter(address, length, store.progress), 0, hashlib.sha256()
    with part.open("wb") as file:
        while block := answer.read(_BLOCK):
            seen += len(block)
            if seen > store.max_bytes:
                store.check_size(address, seen)
            sha.update(block)
            file.write(block)
            counter.add(len(block))
    if length is not None and seen != length:
        raise CheckpointError(f"{address} was cut short: {seen} of {length} bytes came.", cure="Try again.")
    return sha.hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    return str(getattr(error, "reason", "") or error or type(error).__name__)[:200]
