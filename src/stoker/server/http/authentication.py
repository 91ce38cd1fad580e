"""Authentication by API key."""

from __future__ import annotations

import hmac

from stoker.server.errors import AuthenticationError
from stoker.server.http.request_context import RequestContext


def check_key(http: RequestContext, keys: tuple[str, ...]) -> None:
    """Raise AuthenticationError unless `keys` is empty or the request contains one of them."""
    check_authorization(http.headers.get(b"authorization", b""), keys)


def check_authorization(value: bytes, keys: tuple[str, ...]) -> None:
    """`check_key` for the value of the header `authorization`. Compares in constant time."""
    if not keys:
        return
    scheme, _, key = value.partition(b" ")
    if not key:
        raise AuthenticationError("this server requires an API key.", cure="Send the header Authorization: Bearer KEY.")
    matches = [hmac.compare_digest(key.strip(), accepted.encode()) for accepted in keys]
    if scheme.lower() != b"bearer" or not any(matches):
        raise AuthenticationError("the API key is not accepted.", cure="Send the header Authorization: Bearer KEY.")
