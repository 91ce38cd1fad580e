"""Fetches checkpoints and engines from S3 in parallel ranges, which are checked against the listing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import CheckpointError, ConfigError, DependencyError, StokerError
from stoker.deploy.sources import archive
from stoker.deploy.sources.store import Counter, Store, is_inside, without_single_parent

_PART = 64 << 20
_BLOCK = 1 << 20
_THREADS = 8
_MISSING = ("NoSuchBucket", "NoSuchKey", "404", "NotFound")
_DENIED = ("AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")


class StoredObject(msgspec.Struct, frozen=True):
    """One object of the listing."""

    key: str
    size: int
    etag: str


def fetch(location: str, store: Store, client: Any = None) -> Path:
    """Download the objects under BUCKET/PREFIX/, or unpack the archive with the key PREFIX, into `store`. Returns the directory.

    `location` is "BUCKET/PREFIX", the URL without s3://. The directory is keyed by the objects' ETags, so unchanged objects are not
    downloaded again. Credentials, region and endpoint are boto3's defaults, unless `client` is given. Raises CheckpointError for an object
    that is missing, forbidden or truncated.
    """
    bucket, _, prefix = location.partition("/")
    prefix = prefix.strip("/")
    if not bucket:
        raise ConfigError(f"s3://{location} names no bucket.", cure="Write s3://BUCKET/PREFIX.")
    source = _Source(client or _client(), bucket, prefix, store)
    objects = source.objects()
    identity = json.dumps([bucket, prefix, [(o.key, o.size, o.etag) for o in objects]])
    return without_single_parent(store.get("s3", identity, lambda folder: source.download(objects, folder)))


def _client() -> Any:
    """A boto3 client for S3. Raises DependencyError if boto3 is not installed."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise DependencyError("boto3", "Reading s3://", "s3") from None
    return boto3.client("s3", config=Config(max_pool_connections=2 * _THREADS, retries={"max_attempts": 5, "mode": "standard"}))


class _Source:
    """The objects with one prefix in one bucket."""

    def __init__(self, client: Any, bucket: str, prefix: str, store: Store) -> None:
        self._client, self._bucket, self._prefix, self._store = client, bucket, prefix, store
        self._name = f"s3://{bucket}/{prefix}"

    def objects(self) -> list[StoredObject]:
        """The objects to fetch. Raises CheckpointError when there are none, one is outside the folder, or they are too large together."""
        single = archive.is_archive_name(self._prefix)
        prefix = self._prefix if single else f"{self._prefix}/" if self._prefix else ""
        found: list[StoredObject] = []
        total = 0
        for entry in self._list(prefix):
            key, size = entry["Key"], entry["Size"]
            if key.endswith("/") or (single and key != prefix):
                continue
            if not is_inside(key[len(prefix) :] or "archive"):
                raise CheckpointError(f"s3://{self._bucket}/{key} would be outside its folder.", cure="Rename the object.")
            total += size
            found.append(StoredObject(key, size, entry["ETag"]))
            self._store.check_size(self._name, total, len(found))
        if not found:
            raise CheckpointError(f"{self._name} has no objects.", cure="Correct the bucket or the prefix.")
        return found

    def download(self, objects: list[StoredObject], folder: Path) -> None:
        """Download the objects into `folder`. An archive is downloaded to a file next to it and unpacked into it."""
        if not archive.is_archive_name(self._prefix):
            self._fetch({o: folder / o.key[len(self._prefix) :].lstrip("/") for o in objects})
            return
        with tempfile.TemporaryDirectory(dir=self._store.root) as scratch:
            file = Path(scratch) / Path(self._prefix).name
            self._fetch({objects[0]: file})
            archive.extract(file, folder, self._store)

    def _fetch(self, objects: dict[StoredObject, Path]) -> None:
        """Download objects to files, in parallel ranges."""
        counter = Counter(self._name, sum(o.size for o in objects), self._store.progress)
        jobs = [job for item, path in objects.items() for job in self._prepare(item, path)]
        with ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(self._part, *job, counter) for job in jobs]
            try:
                for future in running:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _prepare(self, item: StoredObject, path: Path) -> Iterator[tuple[StoredObject, Path, int, int]]:
        """Create the file with its full size, and yield its ranges as (object, file, first byte, end)."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.truncate(item.size)
        except OSError as error:  # a key that is also the folder of another, or a name that is too long
            text = f"s3://{self._bucket}/{item.key} cannot be a file ({error.strerror})."
            raise CheckpointError(text, cure="Rename the object.") from None
        for start in range(0, item.size, _PART):
            yield item, path, start, min(start + _PART, item.size)

    def _part(self, item: StoredObject, path: Path, start: int, end: int, counter: Counter) -> None:
        """Download the bytes start : end of an object. Raises CheckpointError if it was changed or is truncated."""
        name = f"s3://{self._bucket}/{item.key}"
        with _s3_errors(name):
            response = self._client.get_object(Bucket=self._bucket, Key=item.key, Range=f"bytes={start}-{end - 1}", IfMatch=item.etag)
            num_bytes = _write(response["Body"], path, start, end, counter)
        if num_bytes != end - start:
            text = f"{name} is truncated: {num_bytes} of {end - start} bytes were received."
            raise CheckpointError(text, cure="Try again. If it happens again, upload the object again.")

    def _list(self, prefix: str) -> Iterator[dict[str, Any]]:
        """All entries of the bucket's listing with this prefix."""
        with _s3_errors(self._name):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                yield from page.get("Contents", [])


def _write(body: Any, path: Path, start: int, end: int, counter: Counter) -> int:
    """Write the bytes start : end of a file from a response's body. Returns the number of bytes received."""
    num_bytes = 0
    with path.open("r+b") as file:
        file.seek(start)
        for block in body.iter_chunks(_BLOCK):
            num_bytes += len(block)
            if start + num_bytes > end:
                break
            file.write(block)
            counter.add(len(block))
        os.fsync(file.fileno())
    return num_bytes


class _s3_errors:
    """Converts exceptions of boto3 in the block to a CheckpointError with the object and a fix, without credentials."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (StokerError, GeneratorExit)) or not isinstance(error, Exception):
            return
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, ClientError):
            raise self._response_error(str(error.response.get("Error", {}).get("Code", ""))) from None
        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            cure = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile."
            raise CheckpointError(f"{self._name}: no AWS credentials are found.", cure=cure) from None
        if isinstance(error, (HTTPClientError, BotoCoreError, OSError)):
            text = f"{self._name} is truncated or cannot be reached ({type(error).__name__})."
            raise CheckpointError(text, cure="Check the network and AWS_ENDPOINT_URL, and try again.") from None

    def _response_error(self, code: str) -> CheckpointError:
        """The error for an error code of S3."""
        if code in _MISSING:
            return CheckpointError(f"{self._name} does not exist.", cure="Correct the bucket or the key.")
        if code in _DENIED:
            return CheckpointError(f"{self._name} is refused ({code}).", cure="Use AWS credentials with access to it.")
        if code in ("PreconditionFailed", "412"):
            return CheckpointError(f"{self._name} changed while it was fetched.", cure="Try again.")
        return CheckpointError(f"{self._name}: S3 responded with {code[:60]}.", cure="Try again.")
