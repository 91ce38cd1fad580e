"""Reads bodies of the type multipart/form-data (RFC 7578), as clients send them to upload a file."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser

import msgspec

from stoker.server.errors import BodyError, ContentTypeError

MAX_PARTS = 32
MAX_HEADER_BYTES = 8192
_CURE = "Send multipart/form-data as HTTP clients write it."


class FormPart(msgspec.Struct):
    """One field of a form. `filename` is None unless it is a file."""

    data: bytes
    filename: str | None = None

    def text(self, name: str) -> str:
        """The value as text. Raises BodyError; `name` is the name of the field."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise BodyError(f"the field {name!r} of the form is not UTF-8.", cure=_CURE) from None


def read_form(content_type: bytes, body: bytes) -> dict[str, FormPart]:
    """The fields of a form by name. Raises ContentTypeError for another content type, and BodyError."""
    header = _header("content-type", content_type.decode("latin-1"))
    boundary = header.get_param("boundary", header="content-type")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ContentTypeError(header.get_content_type(), "multipart/form-data with a boundary")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS + 2)
    if len(pieces) < 3 or len(pieces) > MAX_PARTS + 2 or not pieces[-1].startswith(b"--"):
        raise BodyError(f"the form does not have 1 to {MAX_PARTS} fields and an end.", cure=_CURE)
    return dict(_read_part(piece) for piece in pieces[1:-1])


def _read_part(piece: bytes) -> tuple[str, FormPart]:
    """The name and the data of one field: the bytes between two boundaries. Raises BodyError if its head has no valid form or no name."""
    head, separator, data = piece.partition(b"\r\n\r\n")
    if not separator or not head.startswith(b"\r\n") or len(head) > MAX_HEADER_BYTES:
        raise BodyError("a field of the form has no valid head.", cure=_CURE)
    disposition = HeaderParser().parsestr(head[2:].decode("utf-8", "replace"))
    name = disposition.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise BodyError("a field of the form has no name.", cure=_CURE)
    return name, FormPart(data, disposition.get_filename())


def _header(name: str, value: str) -> Message:
    """One header as a message, whose methods parse its parameters."""
    message = Message()
    message[name] = value.replace("\r", "").replace("\n", "")
    return message
