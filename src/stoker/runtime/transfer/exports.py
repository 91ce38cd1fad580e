"""The prompts that this engine computes for others. Their blocks are held until they were read, or until the lease expires.

The step loop adds blocks and releases them; the threads of connections only read, and mark exports as done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from stoker.base.logging import get_logger
from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.kv.prefix_index import PrefixNode, child_digest, pack
from stoker.runtime.request import PrefixRoot, Sequence
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.transfer.layout import EngineLayout
from stoker.runtime.transfer.messages import DECLINE, DONE, NEXT, OK, OPEN, OPENED, SEGMENTS, Next, Open, Opened, Segment, Segments, decode
from stoker.runtime.transfer.ticket import Ticket
from stoker.runtime.worker_group.hosts.link import Link, LinkError

log = get_logger(__name__)

OPEN_WAIT_S = 5.0  # after the reading engine, the computing one receives its request at most this much later


def prompt_digest(root: PrefixRoot, token_ids: list[int], tokens_per_block: int) -> tuple[int, bytes]:
    """(number of full blocks of a prompt without its last token, digest of the last of them, which covers all tokens up to its end)."""
    num_blocks = (len(token_ids) - 1) // tokens_per_block
    parent: PrefixNode | PrefixRoot | bytes = root
    for start in range(0, num_blocks * tokens_per_block, tokens_per_block):
        parent = child_digest(parent, pack(token_ids[start : start + tokens_per_block]))
    return num_blocks, parent if isinstance(parent, bytes) else b""


class Export:
    """A prompt for another engine. `num_committed` of its blocks are computed; `segments` also contains those of steps in flight."""

    def __init__(self, transfer_id: str, seq: Sequence, tokens_per_block: int) -> None:
        self.transfer_id = transfer_id
        self.num_blocks, self.digest = prompt_digest(seq.prefix_root, seq.tokens, tokens_per_block)
        self.segments: list[Segment] = []
        self.num_known = 0
        self.num_committed = 0
        self.failure = ""
        self.deadline: float | None = None  # monotonic seconds after which its blocks are released; None: the sequence still runs
        self.is_done = False  # the other engine has read it, or is gone
        self.link: Link | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all blocks were computed."""
        return self.num_committed == self.num_blocks


class Exports:
    """All exports of an executor."""

    def __init__(self, kv_cache: KVCacheManager, layout: EngineLayout, timeout_s: float) -> None:
        """`timeout_s`: the lease after the prompt is computed, and the longest time that a connection waits for something."""
        self._kv_cache, self._layout, self._timeout_s = kv_cache, layout, timeout_s
        self._by_id: dict[str, Export] = {}
        self._by_seq: dict[int, Export] = {}
        self._refused: deque[str] = deque(maxlen=1024)
        self._changed = threading.Condition()
        self.on_change: Callable[[], None] = lambda: None  # called from threads when the step loop has to release blocks
        self.num_completed = 0  # that were read
        self.num_failed = 0

    @property
    def num_held(self) -> int:
        """The number of exports whose blocks are held."""
        return len(self._by_id)

    # The step loop.

    def begin(self, ticket: Ticket, seq: Sequence) -> None:
        """The sequence computes a prompt for another engine. Called before its first step."""
        export = Export(ticket.transfer_id, seq, self._kv_cache.tokens_per_block)
        with self._changed:
            if ticket.transfer_id in self._by_id or not export.num_blocks:
                return  # a repeated request, or a prompt without a full block
            self._by_id[ticket.transfer_id] = self._by_seq[seq.seq_id] = export
            self._changed.notify_all()

    def refuse(self, ticket: Ticket) -> None:
        """The request with this ticket was refused, so that its prompt is not computed."""
        with self._changed:
            self._refused.append(ticket.transfer_id)
            self._changed.notify_all()

    def on_launch(self, plan: StepPlan, step: int) -> None:
        """A step was launched: its number is `step`. Adds the blocks that it completes."""
        if not self._by_seq:
            return
        size = self._kv_cache.tokens_per_block
        for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
            if (export := self._by_seq.get(seq.seq_id)) is not None and not export.failure:
                with self._changed:
                    self._add(export, seq, start // size if not export.num_known else 0, 0)
                    self._add(export, seq, (start + count) // size, step)
                    self._changed.notify_all()

    def _add(self, export: Export, seq: Sequence, num_blocks: int, step: int) -> None:
        """Hold the blocks up to `num_blocks` that are not held yet."""
        blocks = seq.blocks[export.num_known : min(num_blocks, export.num_blocks)]
        if not blocks:
            return
        for block in blocks:
            self._kv_cache.pool.acquire(block)
        export.segments.append(Segment(step, blocks))
        export.num_known += len(blocks)

    def on_commit(self, plan: StepPlan) -> None:
        """A step was committed."""
        if not self._by_seq:
            return
        size = self._kv_cache.tokens_per_block
        for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
            if (export := self._by_seq.get(seq.seq_id)) is not None:
                with self._changed:
                    export.num_committed = max(export.num_committed, min((start + count) // size, export.num_known))
                    self._changed.notify_all()

    def on_end(self, seq: Sequence) -> None:
        """A sequence has ended. If it has computed its prompt, the lease begins."""
        if (export := self._by_seq.pop(seq.seq_id, None)) is None:
            return
        with self._changed:
            export.deadline = time.monotonic() + self._timeout_s
            if not export.is_complete:
                export.failure = f"has not computed the prompt: the request ended ({seq.finish_reason})"
            self._changed.notify_all()

    def advance(self, now: float) -> None:
        """Release the exports that were read, have failed, or whose lease has expired."""
        for export in list(self._by_id.values()):
            if export.deadline is None:
                continue
            with self._changed:
                if not export.is_done and not export.failure and now < export.deadline:
                    continue
                if not export.is_done:
                    self.num_failed += 1
                    log.warning("the transfer %s was not read: %s", export.transfer_id, export.failure or "its lease has expired")
                export.failure = export.failure or "has released the blocks"
                if export.link is None:
                    self._refused.append(export.transfer_id)
                del self._by_id[export.transfer_id]
                self._changed.notify_all()
            self._kv_cache.release_blocks([block for segment in export.segments for block in segment.blocks])

    # Threads of connections.

    def handle(self, link: Link, kind: int, body: bytearray) -> bool:
        """Answer OPEN, NEXT, DONE and DECLINE. False for another message. Raises LinkError."""
        if kind == OPEN:
            export = self._open(link, decode(body, Open).transfer_id)
            link.send(OPENED, msgspec.msgpack.encode(Opened(export.num_blocks, export.digest, self._layout)))
        elif kind == NEXT:
            segments = self._wait_for_segments(self._export_of(link), decode(body, Next).num_known)
            link.send(SEGMENTS, msgspec.msgpack.encode(Segments(segments)))
        elif kind == DONE:
            self._finish(self._export_of(link))
            self.on_change()
            link.send(OK)
        elif kind == DECLINE:
            self._open(link, decode(body, Open).transfer_id).is_done = True
            self.on_change()
            link.send(OK)
        else:
            return False
        return True

    def on_close(self, link: Link) -> None:
        """A connection was closed: nothing more is read over it."""
        with self._changed:
            for export in self._by_id.values():
                if export.link is link and not export.is_done:
                    export.failure = export.failure or "is not read any more: the connection was closed"
        self.on_change()

    def _open(self, link: Link, transfer_id: str) -> Export:
        """The export with this id, which may be added a little later. Each can be opened once."""
        with self._changed:
            self._changed.wait_for(lambda: transfer_id in self._by_id or transfer_id in self._refused, OPEN_WAIT_S)
            export = self._by_id.get(transfer_id)
            if export is None or export.link is not None:
                raise LinkError("has no request for this transfer, or refused it" if export is None else "has opened this transfer before")
            export.link = link
            return export

    def _export_of(self, link: Link) -> Export:
        """The export that was opened over a connection."""
        with self._changed:
            export = next((each for each in self._by_id.values() if each.link is link), None)
        if export is None:
            raise LinkError("has no open transfer on this connection")
        return export

    def _wait_for_segments(self, export: Export, num_known: int) -> list[Segment]:
        """The segments after the first `num_known` blocks, which end at the end of a segment."""
        with self._changed:
            self._changed.wait_for(lambda: export.failure or export.num_known > num_known, self._timeout_s)
            if export.failure:
                raise LinkError(export.failure)
            found, start = [], 0
            for segment in export.segments:
                if start >= num_known:
                    found.append(segment)
                start += len(segment.blocks)
        if not found:
            raise LinkError(f"has computed no further block within {self._timeout_s:g} s")
        return found

    def _finish(self, export: Export) -> None:
        """The other engine has read all blocks. Raises LinkError unless all were computed and held until now."""
        with self._changed:
            self._changed.wait_for(lambda: export.failure or export.is_complete, self._timeout_s)
            if export.failure or not export.is_complete:
                raise LinkError(export.failure or "has not computed the prompt")
            export.is_done = True
            self.num_completed += 1
