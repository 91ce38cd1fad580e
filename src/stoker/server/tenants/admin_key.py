"""Authentication by the admin key, which is no client's API key."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from stoker.server.errors import AuthenticationError, ForbiddenError
from stoker.server.tenants.accepted_keys import sent_key
from stoker.server.tenants.key_file import digest_of


def check_admin_key(headers: Mapping[bytes, bytes], admin_key: str | None) -> None:
    """Raise ForbiddenError if the server has no admin key, and AuthenticationError unless the headers have it."""
    if admin_key is None:
        raise ForbiddenError("the server has no admin key.", cure="Start it with --admin-key-file or STOKER_ADMIN_KEY.")
    if not hmac.compare_digest(digest_of(sent_key(headers)), digest_of(admin_key)):
        raise AuthenticationError("the admin key is missing or wrong.", cure="Send the header Authorization: Bearer KEY.")
