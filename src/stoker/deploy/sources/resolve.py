"""One door for every address: a local path, a hub id, s3:// or http(s)://."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.base import env
from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy.kinds import Location
from stoker.deploy.secrets import Secret
from stoker.deploy.sources import archive, http, hub, s3
from stoker.deploy.sources.store import MAX_BYTES, Progress, Store

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
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
    """The local directory (or GGUF file) that `location` stands for, downloaded and unpacked when it is not local.

    A path that exists wins over a hub id of the same spelling. `digest` is the sha256 of an archive in hexadecimal; for http(s) it is
    required, here or as #sha256=HEX. `token` opens a private hub repository. `progress(what, done, total)` is called with bytes, from
    several threads. What is fetched is kept under `cache` (default: Stoker's cache), one download at a time for each address.
    Raises ConfigError for an address that cannot be honoured, CheckpointError for what is missing, damaged, cut short or too large.
    """
    store = Store(cache or env.cache_dir() / "sources", max_bytes, progress or _silent)
    scheme, separator, rest = location.partition("://")
    if separator:
        _check_address(location)
        return _fetch(scheme.lower(), rest, location, revision, digest, token, store)
    path = Path(location).expanduser()
    if path.exists():
        return _local(path, digest, store)
    if re.match(r"[./~\\]|[A-Za-z]:\\", location) or location.count("/") > 1:
        raise CheckpointError(f"{location} does not exist.", cure="Correct the path.")
    if not _HUB_ID.fullmatch(location) or ".." in location or "--" in location:
        raise ConfigError(
            f"{location[:200]!r} is neither a path that exists nor a hub id.", cure="Name a directory, ORG/NAME or s3://BUCKET/PREFIX."
        )
    return hub.fetch(location, revision, token, store)


def _check_address(address: str) -> None:
    """Raises ConfigError, which does not repeat it, for an address with a password or a signature: messages show addresses."""
    try:
        Location().read(address)
    except ValueError as error:
        raise ConfigError(f"the address is refused: {error}.") from None


def _fetch(
    scheme: str, rest: str, location: str, revision: str | None, digest: str | None, token: Secret | None, store: Store
) -> Path:  # fmt: skip
    if scheme == "s3":
        return s3.fetch(rest, store)
    if scheme in ("http", "https"):
        return http.fetch(location, digest, store)
    if scheme == "hf":
        return resolve_hub(rest, revision, token, store)
    raise ConfigError(f"{scheme[:20]}:// is not read.", cure="Use a local path, a hub id, s3:// or https://.")


def resolve_hub(rest: str, revision: str | None, token: Secret | None, store: Store) -> Path:
    """hf://ORG/NAME or hf://ORG/NAME@REVISION."""
    name, _, named = rest.partition("@")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"hf://{rest[:200]} is refused.", cure="Write hf://ORG/NAME or hf://ORG/NAME@REVISION.")
    return hub.fetch(name, named or revision, token, store)


def _local(path: Path, digest: str | None, store: Store) -> Path:
    if path.is_dir() or path.suffix in _FILES:
        return path.resolve()
    if archive.recognise(path):
        return archive.unpack(path, digest, store)
    raise CheckpointError(f"{path} is neither a directory nor a tar archive.", cure="Name the directory that holds config.json.")


def _silent(what: str, done: int, total: int | None) -> None:
    return None
