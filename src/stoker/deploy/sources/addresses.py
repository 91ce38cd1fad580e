"""Resolves any location to a local path: a local path, a hub id, an s3:// or an http(s):// address."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.base import env
from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.deploy.locations import Location
from stoker.deploy.secrets import Secret
from stoker.deploy.sources import archive, http, hub, s3
from stoker.deploy.sources.store import MAX_BYTES, Progress, Store

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_VARIANT = re.compile(r"([\w.-]{1,96}/)*[\w.-]{1,96}|")  # a part of a file's name, or its path; empty: no variant
_FILES = (".gguf", ".safetensors")


def resolve(
    location: str,
    *,
    revision: str | None = None,
    digest: str | None = None,
    token: Secret | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """The local directory or GGUF file of `location`, which is downloaded and unpacked if it is not local.

    An existing path takes precedence over a hub id of the same name.
    digest: the sha256 of an archive in hexadecimal. For http(s) it is required, here or as #sha256=HEX.
    token: the access token for a private hub repository.
    progress(name, done, total): called with bytes, from several threads.
    cache: where fetched directories are stored, by default in Stoker's cache. Each address is downloaded by one process at a time.
    Raises ConfigError for an address that is not supported, CheckpointError for one that is missing, damaged, truncated or too large.
    """
    store = Store(cache or env.cache_dir() / "sources", max_bytes, progress or _no_progress)
    scheme, separator, rest = location.partition("://")
    if separator:
        _check_address(location)
        return _fetch(scheme.lower(), rest, location, revision, digest, token, store)
    path = Path(location).expanduser()
    if path.exists():
        return _local(path, digest, store)
    if re.match(r"[./~\\]|[A-Za-z]:\\", location) or location.count("/") > 1:
        raise CheckpointError(f"{location} does not exist.", cure="Correct the path.")
    name, _, variant = location.partition(":")
    if not _HUB_ID.fullmatch(name) or not _VARIANT.fullmatch(variant) or ".." in location or "--" in name:
        raise ConfigError(
            f"{location[:200]!r} is neither a path that exists nor a hub id.", cure="Name a directory, ORG/NAME or s3://BUCKET/PREFIX."
        )
    return hub.fetch(name, revision, token, store, variant or None)


def _check_address(address: str) -> None:
    """Raise ConfigError for an address with a password or signature, because messages contain addresses. This message does not."""
    try:
        Location().check(address)
    except InvalidValueError as error:
        raise ConfigError(f"the address is refused: {error.limit}.", cure=error.cure) from None


def _fetch(scheme: str, rest: str, location: str, revision: str | None, digest: str | None, token: Secret | None, store: Store) -> Path:
    """Fetch an address with one of the supported schemes. Raises ConfigError for another scheme."""
    if scheme == "s3":
        return s3.fetch(rest, store)
    if scheme in ("http", "https"):
        return http.fetch(location, digest, store)
    if scheme == "hf":
        return _fetch_from_hub(rest, revision, token, store)
    raise ConfigError(f"{scheme[:20]}:// is not supported.", cure="Use a local path, a hub id, s3:// or https://.")


def _fetch_from_hub(rest: str, revision: str | None, token: Secret | None, store: Store) -> Path:
    """Fetch ORG/NAME from the hub, with :VARIANT for one GGUF file and @REVISION."""
    location, _, named = rest.partition("@")
    name, _, variant = location.partition(":")
    if not _HUB_ID.fullmatch(name) or not _VARIANT.fullmatch(variant):
        raise ConfigError(f"hf://{rest[:200]} is refused.", cure="Write hf://ORG/NAME, ORG/NAME:VARIANT or hf://ORG/NAME@REVISION.")
    return hub.fetch(name, named or revision, token, store, variant or None)


def _local(path: Path, digest: str | None, store: Store) -> Path:
    """The local path itself, or the unpacked content of a local archive. Raises ConfigError for another file."""
    if path.is_dir() or path.suffix in _FILES:
        return path.resolve()
    if archive.is_archive(path):
        return archive.unpack(path, digest, store)
    raise CheckpointError(f"{path} is neither a directory nor a tar archive.", cure="Name the directory that contains config.json.")


def _no_progress(name: str, done: int, total: int | None) -> None:
    """Ignores progress reports."""
    return
