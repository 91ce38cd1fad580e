"""Authentication by API key."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from stoker.server.errors import AuthenticationError
from stoker.server.http.request_context import RequestContext

_SCHEMES = (b"bearer", b"api-key")  # OpenAI's and most clients; Baseten's
_CURE = "Send the header Authorization: Bearer KEY, or x-api-key: KEY."


def check_key(http: RequestContext, keys: tuple[str, ...]) -> None:
    """Raise AuthenticationError unless `keys` is empty or the request contains one of them."""
    check_headers(http.headers, keys)


def check_headers(headers: Mapping[bytes, bytes], keys: tuple[str, ...]) -> None:
    """`check_key` for headers, or gRPC metadata, with names in lower case. Compares in constant time."""
    if not keys:
        return
    key = _key_of(headers)
    if not key:
        raise AuthenticationError("this server requires an API key.", cure=_CURE)
    matches = [hmac.compare_digest(key, accepted.encode()) for accepted in keys]
    if not any(matches):
        raise AuthenticationError("the API key is not accepted.", cure=_CURE)


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in `authorization`, or else in `x-api-key`, which Anthropic's clients send; empty without one."""
    scheme, _, key = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme:
        return key.strip() if scheme.lower() in _SCHEMES else b""
    return headers.get(b"x-api-key", b"").strip()
