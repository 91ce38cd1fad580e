"""gzip and deflate of bodies. The size of a decompressed body is limited."""

from __future__ import annotations

import gzip
import zlib

from stoker.server.errors import BodyTooLargeError
from stoker.server.protocols.kserve.errors import TritonError

_WBITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


def decompress(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The decompressed body. Raises TritonError for an unknown encoding or damaged data, BodyTooLargeError for more than `limit` bytes."""
    if encoding in (b"", b"identity"):
        return body
    if encoding not in _WBITS:
        raise TritonError(f"Unsupported Content-Encoding: {encoding[:40].decode('latin-1')!r}. Use gzip, deflate or identity.", 415)
    stream = zlib.decompressobj(_WBITS[encoding])
    try:
        data = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise TritonError(f"the request's body is not {encoding.decode()} data: {error}") from None
    if len(data) > limit:
        raise BodyTooLargeError(None, limit)
    if not stream.eof:
        raise TritonError(f"the request's body ends in the middle of its {encoding.decode()} data")
    return data


def compress(body: bytes, accepted: bytes) -> tuple[bytes, bytes]:
    """(body, encoding) in gzip or deflate, if the client accepts it. Otherwise the body as it is, and b""."""
    encodings = [part.split(b";")[0].strip() for part in accepted.split(b",") if b"q=0" not in part.replace(b" ", b"").split(b";", 1)[-1]]
    if b"gzip" in encodings:
        return gzip.compress(body, 1, mtime=0), b"gzip"
    if b"deflate" in encodings:
        return zlib.compress(body, 1), b"deflate"
    return body, b""
