"""The built files of the console, as they are sent: with their content type, their entity tag, and compressed."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from importlib.resources import files

import msgspec

from stoker.server.errors import RouteError
from stoker.server.http.request_context import HTML, Headers, RequestContext

INDEX = "index.html"
TYPES = {".html": HTML, ".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8", ".svg": b"image/svg+xml"}

# The page runs its own script only, connects to this server only, and cannot be embedded in another page.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # a browser compares the entity tag before it uses its copy
    (b"vary", b"accept-encoding"),
)


class StaticFile(msgspec.Struct, frozen=True):
    """One file of the console."""

    body: bytes
    compressed: bytes
    content_type: bytes
    tag: bytes


class StaticFiles:
    """The files of the folder `static` of this package, which Vite writes: the page, and its script, style and icon in `console/`.

    They are read at the first request.
    """

    async def respond(self, http: RequestContext, name: str) -> None:
        """Send the file `name`, or status 304 if the browser has it. Raises RouteError if there is no such file."""
        found = self._files.get(name)
        if found is None:
            raise RouteError(f"/console/{name}")
        headers: list[tuple[bytes, bytes]] = [*_HEADERS, (b"etag", found.tag)]
        if found.tag in http.headers.get(b"if-none-match", b""):
            await http.respond(304, b"", found.content_type, headers)
        elif b"gzip" in http.headers.get(b"accept-encoding", b""):
            await http.respond(200, found.compressed, found.content_type, [*headers, (b"content-encoding", b"gzip")])
        else:
            await http.respond(200, found.body, found.content_type, headers)

    @cached_property
    def _files(self) -> dict[str, StaticFile]:
        """The files by name."""
        folder = files(__package__).joinpath("static")
        found = [folder.joinpath(INDEX), *folder.joinpath("console").iterdir()]
        return {each.name: _read(each.name, each.read_bytes()) for each in found}


def _read(name: str, body: bytes) -> StaticFile:
    """The file `name` with the content `body`."""
    kind = TYPES["." + name.rpartition(".")[2]]
    return StaticFile(body, gzip.compress(body, mtime=0), kind, b'"' + hashlib.sha256(body).hexdigest()[:20].encode() + b'"')


NOT_CACHED: Headers = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
