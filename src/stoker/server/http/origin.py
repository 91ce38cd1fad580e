"""Refuses what web pages of other sites make a browser send.

A page may post to any address without a preflight request if the content type is one of WITHOUT_PREFLIGHT. Browsers add Origin to each
POST; clients of KServe, SageMaker and Truss, which also post with such types, do not.

A page can also let its own name refer to 127.0.0.1 after it was loaded (DNS rebinding). For the browser, the server then belongs to the
site of that page. Such a request has the page's name as its Host. A server that only this machine can reach and that has no API keys
therefore answers browsers only under local names.
"""

from __future__ import annotations

import ipaddress

from stoker.base.errors import StokerError
from stoker.server.errors import ContentTypeError
from stoker.server.http.request_context import RequestContext
from stoker.server.settings import ServerSettings

# Content types that a web page may post to another origin without a preflight request ("" is none at all).
WITHOUT_PREFLIGHT = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_BROWSER_HEADERS = (b"origin", b"sec-fetch-site", b"sec-fetch-mode")


class SiteError(StokerError):
    """A browser uses a name for this server that may belong to another site."""

    status = 403
    code = "foreign_site"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the host name {name[:80]!r} is refused for browsers, because it may belong to another site.",
            cure="Use localhost or 127.0.0.1 in the address, or start the server with --api-keys, or --cors-origin and this origin.",
        )


def check_site(http: RequestContext, settings: ServerSettings, *, has_keys: bool) -> None:
    """Raise ContentTypeError or SiteError for a request that the page of another site may have caused. `has_keys`: requests need a key."""
    origin = http.headers.get(b"origin")
    if origin is not None and {"*", origin.decode("latin-1")} & set(settings.cors_origins):
        return
    if http.method == "POST" and origin is not None and http.content_type in WITHOUT_PREFLIGHT:
        raise ContentTypeError(http.content_type)
    if not has_keys and _is_loopback(settings.host) and _is_browser(http):
        name = _host_name(http.headers.get(b"host", b"").decode("latin-1"))
        if not _is_local(name) and not {"*", f"http://{name}", f"https://{name}"} & set(settings.cors_origins):
            raise SiteError(name)


def _is_browser(http: RequestContext) -> bool:
    """Whether a browser sent the request. Pages cannot change these headers."""
    return any(name in http.headers for name in _BROWSER_HEADERS) or http.headers.get(b"user-agent", b"").startswith(b"Mozilla/")


def _is_loopback(host: str) -> bool:
    """Whether a server that listens at `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_name(host: str) -> str:
    """The name or address in a Host header, without its port, in lower case."""
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.strip("[]").rstrip(".").lower()


def _is_local(name: str) -> bool:
    """Whether only this machine or its network can define the name: an address, a name without a dot, or one in .localhost or .local."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith((".localhost", ".local"))
    return True
