"""The prompts that another engine computes for this one: their blocks are read before the sequences of a request are queued.

The sequences then find the blocks in the prefix index, as after any earlier request with the same prompt. If a transfer fails, they do
not find them, and this engine computes the prompt itself. The step loop allocates, adopts and releases blocks; a thread per import reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from stoker.base.logging import get_logger
from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.request import PrefixRoot, TokenRequest
from stoker.runtime.transfer.exports import prompt_digest
from stoker.runtime.transfer.held_prompts import HeldPrompts, ImportTargets
from stoker.runtime.transfer.layout import EngineLayout, RankLayout
from stoker.runtime.transfer.messages import (
    BEGIN,
    DECLINE,
    DONE,
    NEXT,
    OK,
    OPEN,
    OPENED,
    PULL,
    PULLED,
    SEGMENTS,
    Begin,
    FailedError,
    Next,
    Open,
    Opened,
    Pull,
    Pulled,
    Segment,
    Segments,
    connect,
    decode,
    receive,
    request,
)  # fmt: skip
from stoker.runtime.transfer.puller import Puller, Rank
from stoker.runtime.transfer.ticket import Ticket
from stoker.runtime.worker_group.hosts.link import Link, LinkError

log = get_logger(__name__)

MAX_THREADS = 16  # imports at the same time; further ones wait


class CancelledError(LinkError):
    """The request has ended."""


class UnansweredError(LinkError):
    """A rank of this engine has not answered, and may write to the targets at any time."""


class UnabortedError(UnansweredError):
    """A copy of this rank could not be aborted, and writes to the targets until its agent reports that it has ended."""


class Import:
    """A prompt that is read. `result` is set when its sequences can be queued."""

    def __init__(self, ticket: Ticket, token_request: TokenRequest, tokens_per_block: int) -> None:
        self.ticket, self.token_ids = ticket, token_request.prompt_ids
        self.root: PrefixRoot = token_request.cache_salt if token_request.adapter < 0 else (token_request.adapter, token_request.cache_salt)
        self.max_tokens = token_request.params.max_tokens
        self.num_blocks, self.digest = prompt_digest(self.root, self.token_ids, tokens_per_block)
        self.result: Future[None] = Future()
        self.started = time.monotonic()
        self.targets: ImportTargets | None = None  # the blocks that are written
        self.num_zeroed = 0  # blocks that each rank has zeroed before it writes to the targets, which may be among them
        self.wants_blocks = False
        self.may_give_way = False  # its source may wait for blocks that are held here, and resolves such a wait only by its time-out
        self.gives_way = False
        self.has_blocks = threading.Event()
        self.num_bytes = 0
        self.read_time_s = 0.0
        self.failure = ""
        self.may_be_written = False  # a rank may still write to the targets of a failed import
        self.ends_here = False  # only this rank may

    def check(self) -> None:
        """Raise CancelledError if the request has ended."""
        if self.result.cancelled():
            raise CancelledError("was cancelled")
        if self.gives_way and not self.has_blocks.is_set():
            raise LinkError("was not read: both engines wait for blocks that the other one has to read")


class Imports:
    """All imports of an executor. `held`: those that are complete, whose sequences wait."""

    def __init__(self, kv_cache: KVCacheManager, layout: EngineLayout, rank: Rank, others: list[RankLayout]) -> None:
        """`rank`: this rank; `others`: the other ranks of this engine, which read on request."""
        self._kv_cache, self._layout, self._rank, self._others = kv_cache, layout, rank, others
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv import")
        self.held = HeldPrompts(kv_cache)
        self.on_change: Callable[[], None] = lambda: None  # called from threads when the step loop has to allocate or adopt blocks
        self._imports: list[Import] = []
        self._ended: queue.SimpleQueue[Import] = queue.SimpleQueue()
        self._unaborted: list[ImportTargets] = []  # of failed imports, to which copies of this rank may still write
        self.num_completed = 0
        self.num_failed = 0
        self.num_cancelled = 0
        self.num_bytes = 0
        self.time_s = 0.0
        self.read_time_s = 0.0  # without the waits for the first block and for free blocks

    @property
    def num_running(self) -> int:
        """The number of prompts that are read."""
        return len(self._imports)

    # The step loop.

    def begin(self, ticket: Ticket, token_request: TokenRequest) -> Future[None] | None:
        """Start to read the prompt of a request. None if all its blocks are here. Cancelling the future ends the import.

        None also if the ticket was used before: its transfer is the key of blocks, and it can be read only once.
        """
        if ticket.transfer_id in self.held or any(each.ticket.transfer_id == ticket.transfer_id for each in self._imports):
            return None
        each = Import(ticket, token_request, self._kv_cache.tokens_per_block)
        if len(self._kv_cache.cached_prefix(each.root, each.token_ids)) == each.num_blocks:
            if each.num_blocks:
                self._threads.submit(self._decline, each)
            return None
        self._imports.append(each)
        self._threads.submit(self._run, each)
        return each.result

    def end_read(self) -> None:
        """End the imports that are complete or have failed, and release blocks to which no copy writes any more."""
        while not self._ended.empty():
            self._end(self._ended.get())
        if self._unaborted and self._rank.nixl is not None and not self._rank.nixl.may_write:
            for targets in self._unaborted:
                self.held.reclaim(targets)
            self._unaborted.clear()

    def allocate(self) -> None:
        """Allocate blocks for imports that need them, in order. All poisoned free blocks were passed to the runner to be zeroed."""
        for each in self._imports:
            if not each.wants_blocks:
                continue
            targets = self.held.allocate(each.ticket.transfer_id, each.root, each.token_ids, each.max_tokens)
            if targets is None:
                return
            each.targets, each.num_zeroed, each.wants_blocks = targets, self._rank.progress.num_zeroed, False
            each.has_blocks.set()

    def give_way(self) -> None:
        """Let the first import that waits for blocks fail, if this engine has to resolve the wait of two engines for each other.

        Its source then releases the blocks of the prompt, which may be those for which an import of the source waits.
        """
        waiting = next((each for each in self._imports if each.wants_blocks), None)
        if waiting is not None and waiting.may_give_way:
            waiting.wants_blocks, waiting.gives_way = False, True

    def close(self) -> None:
        """End all imports, and wait until nothing is written to the cache any more."""
        for each in self._imports:
            each.result.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _end(self, each: Import) -> None:
        """An import's thread has ended: adopt its blocks, or discard them."""
        self._imports.remove(each)
        key = each.ticket.transfer_id  # not the id of the request, which a client can repeat after it has cancelled the first one
        self.num_bytes += each.num_bytes
        self.time_s += time.monotonic() - each.started
        self.read_time_s += each.read_time_s
        if each.targets is not None and each.ends_here:
            self.held.abandon(key, each.targets)
            self._unaborted.append(each.targets)
        elif each.targets is not None and each.may_be_written:
            log.error("%d blocks are not used any more, because a rank that has not answered may write to them", len(each.targets.blocks))
            self.held.abandon(key, each.targets)
        elif each.targets is not None and each.failure:
            self.held.discard(key, each.targets)
        elif each.targets is not None and not self.held.hold(key, each.root, each.token_ids, each.targets):
            each.failure = "was read, but blocks before it, which were here, are not valid any more"
        if each.result.cancelled():
            self.held.release(key)
            self.num_cancelled += 1
            return
        if each.failure:
            self.num_failed += 1
            log.warning(
                "the transfer %s of %d tokens failed, and the prompt is computed here: %s:%d %s",
                each.ticket.transfer_id, len(each.token_ids), each.ticket.host, each.ticket.port, each.failure,
            )  # fmt: skip
        else:
            self.num_completed += 1
        each.result.set_result(None)

    # The threads.

    def _decline(self, each: Import) -> None:
        """Let the other engine release the blocks of a prompt that is not read."""
        try:
            link = connect(each.ticket.host, each.ticket.port, self._rank.key, self._rank.timeout_s)
            try:
                request(link, DECLINE, Open(each.ticket.transfer_id), OK, 2 * self._rank.timeout_s, each.check)
            finally:
                link.close()
        except LinkError as error:
            log.debug("the transfer %s could not be declined: it %s", each.ticket.transfer_id, error)

    def _run(self, each: Import) -> None:
        """Read one prompt. Whatever fails becomes `failure`."""
        try:
            each.check()
            link = connect(each.ticket.host, each.ticket.port, self._rank.key, self._rank.timeout_s)
            try:
                self._read(each, link)
            finally:
                link.close()
        except LinkError as error:
            each.failure, each.may_be_written = str(error), isinstance(error, UnansweredError)
            each.ends_here = isinstance(error, UnabortedError)
        except Exception as error:
            log.exception("the transfer %s failed", each.ticket.transfer_id)
            each.failure = repr(error)
        self._ended.put(each)
        self.on_change()

    def _read(self, each: Import, link: Link) -> None:
        """Read all blocks that are not here, and confirm it to the exporting engine, which has held them until then."""
        timeout_s = self._rank.timeout_s
        opened = decode(request(link, OPEN, Open(each.ticket.transfer_id), OPENED, 2 * timeout_s, each.check), Opened)
        source = _with_host(opened.layout, each.ticket.host)
        self._check_source(source, opened, each)
        # Blocks are allocated when the source has blocks for the prompt. Earlier, they could be those for which another import waits, whose
        # prompt fills the cache of the source until it is read.
        segments = self._next_segments(each, link, 0)
        # Both engines compare the same two layouts, so that of two engines that wait for each other (at least) one gives way.
        each.may_give_way = msgspec.msgpack.encode(self._layout) <= msgspec.msgpack.encode(opened.layout)
        each.wants_blocks = True
        self.on_change()
        deadline = time.monotonic() + timeout_s
        while not each.has_blocks.wait(0.05):
            each.check()
            if time.monotonic() > deadline:
                each.wants_blocks = False
                if not each.has_blocks.is_set():
                    raise LinkError(f"was not read: no {each.num_blocks} blocks were free here within {timeout_s:g} s")
        started = time.monotonic()
        ranks = _RankGroup(self._rank, self._others, source)
        try:
            known = 0
            while True:
                for segment in segments:
                    each.check()
                    self._pull(each, ranks, segment, known)
                    known += len(segment.blocks)
                if known >= each.num_blocks:
                    break
                segments = self._next_segments(each, link, known)
        finally:
            each.read_time_s = time.monotonic() - started
            ranks.close()
        link.send(DONE)
        receive(link, OK, 2 * timeout_s)

    def _next_segments(self, each: Import, link: Link, num_known: int) -> list[Segment]:
        """The segments after the first `num_known` blocks, for which the source may have to start a step first."""
        body = request(link, NEXT, Next(num_known), SEGMENTS, 2 * self._rank.timeout_s, each.check)
        return decode(body, Segments).segments

    def _pull(self, each: Import, ranks: _RankGroup, segment: Segment, start: int) -> None:
        """Read a segment that begins at block `start` of the prompt, without the blocks that are here."""
        if not segment.blocks or start + len(segment.blocks) > each.num_blocks:
            raise LinkError("sent a segment of a wrong length")
        assert each.targets is not None
        first_target, targets = len(each.targets.prefix), each.targets.blocks
        skip = max(0, first_target - start)
        blocks, first = segment.blocks[skip:], start + skip
        if blocks:
            targets = targets[first - first_target : first - first_target + len(blocks)]
            each.num_bytes += ranks.pull(Pull(segment.step, first, blocks, targets, each.num_zeroed))

    def _check_source(self, source: EngineLayout, opened: Opened, each: Import) -> None:
        """Raise LinkError if blocks of the other engine cannot be used here."""
        own = self._layout
        for name in ("checkpoint", "num_layers", "tokens_per_block"):
            if getattr(source, name) != getattr(own, name):
                raise LinkError(f"has another engine: {name} is {getattr(source, name)}, here {getattr(own, name)}")
        if (opened.num_blocks, opened.digest) != (each.num_blocks, each.digest):
            raise LinkError("computes another prompt")


class _RankGroup:
    """The readers of all ranks of this engine, for one import."""

    def __init__(self, rank: Rank, others: list[RankLayout], source: EngineLayout) -> None:
        self._timeout_s = rank.timeout_s
        self._links: list[Link] = []
        self._puller: Puller | None = None
        try:
            for other in others:
                link = connect(other.host, other.port, rank.key, rank.timeout_s)
                self._links.append(link)
                request(link, BEGIN, Begin(source), OK, 2 * rank.timeout_s)
            self._puller = Puller(rank, source)
        except BaseException:
            self.close()
            raise

    def pull(self, pull: Pull) -> int:
        """Read a segment on all ranks, and return the number of bytes.

        Raises UnansweredError if a rank may still write. After any other error, no rank writes any more.
        """
        assert self._puller is not None
        failure: Exception | None = None
        unanswered: LinkError | None = None
        started: list[Link] = []
        num_bytes, body = 0, msgspec.msgpack.encode(pull)
        try:
            for link in self._links:
                link.send(PULL, body)
                started.append(link)
            num_bytes += self._puller.pull(pull)
        except Exception as error:  # also other errors than LinkError, such as those of memory: the ranks that were started are awaited
            failure = error
        for link in started:
            try:  # each rank ends a read by itself when its source is silent for its time-out
                num_bytes += decode(receive(link, PULLED, 100 * self._timeout_s), Pulled).num_bytes
            except FailedError as error:
                failure = failure or error
            except LinkError as error:
                unanswered = error
        if unanswered is not None:
            raise UnansweredError(f"was not read: a rank of this engine {unanswered}") from failure
        if failure is not None:
            if not self._puller.close():
                raise UnabortedError("was not read, and a copy of it could not be aborted") from failure
            raise failure
        return num_bytes

    def close(self) -> None:
        """Close all connections."""
        if self._puller is not None:
            self._puller.close()
        for link in self._links:
            link.close()


def _with_host(layout: EngineLayout, host: str) -> EngineLayout:
    """The layout, in which ranks without a host have that of the transfer address."""
    return msgspec.structs.replace(layout, ranks=[each if each.host else msgspec.structs.replace(each, host=host) for each in layout.ranks])
