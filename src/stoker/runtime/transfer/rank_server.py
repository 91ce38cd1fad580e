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
ACCEPT_PAUSE_S = 0.1  # after a failure to accept a connection

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
        self._num_connections = 0  # including those in their handshake
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, rank: Rank, progress: StepProgress, plain_dtype: torch.dtype, handler: Handler | None = None) -> None:
        """Accept connections from now on. `handler` is called in the threads of connections."""
        self._rank, self._progress, self._plain_dtype = rank, progress, plain_dtype
        if handler is not None:
            self._handler = handler
        threading.Thread(target=self._accept, name="kv transfers", daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed.set()
            links = list(self._links)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()

    def _accept(self) -> None:
        """The loop of the thread that accepts connections."""
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # such as ECONNABORTED, or EMFILE until a file of this process is closed
                if not self._closed.wait(ACCEPT_PAUSE_S):
                    log.warning("a KV transfer was not accepted: %s", error.strerror or error)
                continue
            try:
                self._start_serving(connection, address[0])
            except RuntimeError as error:  # no thread can be started
                log.warning("refused a KV transfer of %s: %s", address[0], error)
                connection.close()

    def _start_serving(self, connection: socket.socket, host: str) -> None:
        """Start a thread for a connection. Raises RuntimeError if there are too many connections or threads."""
        with self._lock:
            if self._num_connections >= MAX_LINKS:
                raise RuntimeError(f"{MAX_LINKS} connections are open")
            self._num_connections += 1
        try:
            threading.Thread(target=self._serve, args=(connection, host), name="kv transfer", daemon=True).start()
        except BaseException:
            self._count_closed()
            raise

    def _count_closed(self) -> None:
        """A connection was closed."""
        with self._lock:
            self._num_connections -= 1

    def _serve(self, connection: socket.socket, host: str) -> None:
        """The thread of one connection."""
        try:
            link = accept_link(connection, self._key)
            link.max_bytes = MAX_FRAME_BYTES
            self._answer(link, host)
        except (LinkError, OSError) as error:
            log.warning("refused a KV transfer of %s, which %s", host, error)
        finally:
            connection.close()
            self._count_closed()

    def _answer(self, link: Link, host: str) -> None:
        """Answer the messages of one connection until it is closed."""
        with self._lock:
            self._links.add(link)
            is_closed = self._closed.is_set()
        puller: Puller | None = None
        failure: str | None = None
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
            failure = str(error)
        except Exception as error:
            log.exception("a KV transfer of %s failed", host)
            failure = repr(error)
        finally:
            # Before the answer, because it aborts copies that are not complete. Without an answer, the leader does not reuse the blocks.
            has_ended = puller is None or puller.close()
            if failure is not None and has_ended:
                send_failure(link, failure)
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
