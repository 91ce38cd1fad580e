"""The messages between executors, in frames of authenticated links (`worker_group.hosts.link`).

    to the leader of the exporting engine       OPEN → OPENED, then NEXT → SEGMENTS until all blocks are known, then DONE → OK;
                                                or DECLINE → OK, because nothing is read
    to each rank of the exporting engine        READ → one LAYER per layer: its keys, its values
    to each other rank of the importing engine  BEGIN → OK, then PULL → PULLED for each segment

FAILED with a text is the answer to any of them. Bodies are msgpack, except LAYER, which consists of the bytes of pages.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from stoker.runtime.transfer.layout import EngineLayout
from stoker.runtime.worker_group.hosts.link import Link, LinkError, open_link

OPEN, OPENED, NEXT, SEGMENTS, DONE, OK, READ, LAYER, BEGIN, PULL, PULLED, DECLINE, FAILED = range(1, 14)

MAX_LAYER_BYTES = 8 << 20  # of a LAYER frame, unless a single block is larger
MAX_FRAME_BYTES = 64 << 20
MAX_BLOCKS = 1 << 20

Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Blocks = Annotated[list[Block], msgspec.Meta(max_length=MAX_BLOCKS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Heads = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]], msgspec.Meta(max_length=1 << 12)]

T = TypeVar("T")


class Open(msgspec.Struct, array_like=True):
    """A request for a prompt, which the exporting engine may have received a little later."""

    transfer_id: Annotated[str, msgspec.Meta(max_length=64)]


class Opened(msgspec.Struct, array_like=True):
    """The prompt exists: the number of its blocks, the digest of the last one, which covers all tokens up to its end, and the layout."""

    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    layout: EngineLayout


class Next(msgspec.Struct, array_like=True):
    """A request for the segments after the first `num_known` blocks. The answer arrives as soon as there is one."""

    num_known: Number


class Segment(msgspec.Struct, array_like=True):
    """Consecutive blocks of the prompt that one step computes; 0: an earlier one."""

    step: Number
    blocks: Blocks


class Segments(msgspec.Struct, array_like=True):
    """Segments in the order of the prompt."""

    segments: Annotated[list[Segment], msgspec.Meta(max_length=MAX_BLOCKS)]


class Read(msgspec.Struct, array_like=True):
    """A request for heads of layers. `first_block`: index in the prompt of the first of `blocks`."""

    step: Number
    first_block: Number
    blocks: Blocks
    layers: Annotated[list[tuple[Number, Heads]], msgspec.Meta(max_length=4096)]  # (local layer, local heads)
    is_raw: bool  # bytes as they are stored; otherwise values of `plain_dtype`
    sends_pages: bool = True  # False: LAYER frames are empty, because the reader copies the pages with NIXL


class Begin(msgspec.Struct, array_like=True):
    """The next PULL messages of this link read from the engine with this layout."""

    layout: EngineLayout


class Pull(msgspec.Struct, array_like=True):
    """A rank of the importing engine reads its part of a segment into `targets`, after it has zeroed `num_zeroed` blocks since its start.

    The targets may be among these blocks.
    """

    step: Number
    first_block: Number
    blocks: Blocks
    targets: Blocks
    num_zeroed: Number


class Pulled(msgspec.Struct, array_like=True):
    """The bytes that a rank has received for a segment."""

    num_bytes: Number


class FailedError(LinkError):
    """The other end has answered FAILED: it has ended what was requested."""


def connect(host: str, port: int, key: bytes, timeout_s: float) -> Link:
    """An authenticated link to a transfer address. Raises LinkError."""
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise LinkError(f"{host}:{port} cannot be reached ({error.strerror or error})") from None
    try:
        link = open_link(connection, key)
    except BaseException:
        connection.close()
        raise
    link.max_bytes = MAX_FRAME_BYTES
    return link


def request(link: Link, kind: int, body: msgspec.Struct, answer: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> bytes:
    """Send a message and return the body of its answer. Raises LinkError if it is FAILED or of another kind."""
    link.send(kind, msgspec.msgpack.encode(body), check=check)
    return receive(link, answer, timeout_s, check)


def receive(link: Link, kind: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> bytes:
    """The body of the next message. Raises FailedError if it is FAILED, and LinkError if it is not of this kind."""
    got, body = link.receive(timeout_s, check)
    if got == FAILED:
        raise FailedError(bytes(body[:1000]).decode(errors="replace"))
    if got != kind:
        raise LinkError(f"sent a message of kind {got} instead of {kind}")
    return bytes(body)


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """The message in a body. Raises LinkError for a malformed one."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LinkError(f"sent a malformed message: {error}") from None


def send_failure(link: Link, reason: str) -> None:
    """Send FAILED, unless the link is broken."""
    with contextlib.suppress(LinkError):
        link.send(FAILED, reason.encode()[:1000])
