"""The server of one rank's KV cache: sends blocks to other engines, and reads blocks of theirs when the leader of this one requests it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec
import torch

from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.runtime.transfer.messages import (
    BEGIN,
    LAYER,
    MAX_FRAME_BYTES,
    OK,
    PULL,
    PULLED,
    READ,
    Begin,
    Pull,
    Pulled,
    Read,
    decode,
    send_failure,
)  # fmt: skip
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.transfer.puller import Puller, Rank
from stoker.runtime.worker_group.hosts.link import Link, LinkError, accept_link

log = get_logger(__name__)

MAX_LINKS = 256
IDLE_TIMEOUT_S = 600.0

Handler = Callable[[Link, int, bytearray], bool]  # True if it has handled the message


class RankServer:
    """Serves one rank, with a thread for each connection. A message that it does not know is passed to `handler`, and then refused."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.on_close: Callable[[Link], None] = lambda link: None
        self._listener, self._key = listener, key
        self._rank: Rank | None = None
        self._progress: StepProgress | None = None
        self._plain_dtype = torch.float32
        self._handler: Handler = lambda link, kind, body: False
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self, rank: Rank, progress: StepProgress, plain_dtype: torch.dtype, handler: Handler | None = None) -> None:
        """Accept connections from now on. `handler` is called in the threads of connections."""
        self._rank, self._progress, self._plain_dtype = rank, progress, plain_dtype
        if handler is not None:
            self._handler = handler
        threading.Thread(target=self._accept, name="kv transfers", daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()

    def _accept(self) -> None:
        """The loop of the thread that accepts connections."""
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_full = len(self._links) >= MAX_LINKS
            if is_full:
                log.warning("refused a KV transfer of %s: %d connections are open", address[0], MAX_LINKS)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, address[0]), name="kv transfer", daemon=True).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        """Answer the messages of one connection until it is closed."""
        try:
            link = accept_link(connection, self._key)
        except LinkError as error:
            log.warning("refused a KV transfer of %s, which %s", host, error)
            connection.close()
            return
        link.max_bytes = MAX_FRAME_BYTES
        with self._lock:
            self._links.add(link)
            is_closed = self._closed
        puller: Puller | None = None
        try:
            while not is_closed:
                kind, body = link.receive(IDLE_TIMEOUT_S)
                if kind == READ:
                    self._read(link, decode(body, Read))
                elif kind == BEGIN:
                    puller = self._begin(link, decode(body, Begin))
                elif kind == PULL:
                    self._pull(link, puller, decode(body, Pull))
                elif not self._handler(link, kind, body):
                    raise LinkError(f"sent a message of kind {kind}")
        except LinkError as error:
            log.debug("a KV transfer of %s has ended: it %s", host, error)
            send_failure(link, str(error))
        except Exception as error:
            log.exception("a KV transfer of %s failed", host)
            send_failure(link, repr(error))
        finally:
            if puller is not None:
                puller.close()
            with self._lock:
                self._links.discard(link)
            link.close()
            self.on_close(link)

    def _read(self, link: Link, read: Read) -> None:
        """Send the requested heads of each layer, as soon as it is computed."""
        rank, progress = self._rank, self._progress
        assert rank is not None and progress is not None
        pages = rank.pages
        if any(block >= pages.num_blocks for block in read.blocks) or not read.blocks:
            raise LinkError("requests blocks outside the KV cache")
        dtype = None if read.is_raw else self._plain_dtype
        for layer, heads in read.layers:
            if layer >= len(pages.caches) or any(head >= pages.caches[layer].keys.shape[1] for head in heads):
                raise LinkError("requests a layer or a head that this rank does not have")
            if len(read.blocks) * pages.block_bytes(layer, len(heads), dtype) > MAX_FRAME_BYTES - 64 and read.sends_pages:
                raise LinkError("requests more than fits into a frame")
            if not progress.wait(read.step, layer, rank.timeout_s):
                raise LinkError(f"waits for step {read.step}, which has not computed layer {layer} within {rank.timeout_s:g} s")
            parts = pages.read(layer, heads, read.blocks, read.first_block, dtype) if read.sends_pages else []
            link.send(LAYER, *(part.numpy().data for part in parts))

    def _begin(self, link: Link, begin: Begin) -> Puller:
        """Connect to another engine. A failure is the answer, and ends this connection."""
        assert self._rank is not None
        puller = Puller(self._rank, begin.layout)
        link.send(OK)
        return puller

    def _pull(self, link: Link, puller: Puller | None, pull: Pull) -> None:
        """Read a segment, and answer when it is complete."""
        if puller is None:
            raise LinkError("sent a pull before its begin")
        num_bytes = puller.pull(pull)
        link.send(PULLED, msgspec.msgpack.encode(Pulled(num_bytes)))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be used."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MAX_LINKS)
    except OSError as error:
        raise ConfigError(f"transfer={host}:{port} cannot be used: {error.strerror or error}.", cure="Choose another address.") from None
