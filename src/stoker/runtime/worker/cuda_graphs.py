"""CUDA graphs of whole steps: inputs are copied into fixed buffers and one replay runs model and sampler.

A graph belongs to a padded shape. Steps of decodes have one for each bucket of rows, short mixed steps one for each bucket of
tokens and rows; longer steps keep the device busy for so long that launching them kernel by kernel costs nothing.
"""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.dummy_step import Bounds, fill_dummy_step, static_buffer_size
from stoker.runtime.worker.inputs import InputBuilder, Packed, Shape, StepInputs

log = get_logger(__name__)

_TOKEN_BUCKETS = (64, 128, 256, 512, 1024, 2048)
_MIXED_ROWS = (8, 64, 256)

# What is captured: batch, rows, counters, all_greedy → token ids.
Forward = Callable[[ForwardBatch, Tensor, Tensor, bool], Tensor]


@dataclass(slots=True)
class Captured:
    """A graph and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    logits_rows: int


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A capture fails when a graph of another engine is destroyed meanwhile, which the garbage collector may do at any time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unused() -> int:
    """Bytes of the device, once what the allocator only keeps is given back: a graph's memory may come from there too."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 3, 4 (each a token more in a fused layer), 8, then steps that waste at most a fifth of a step's rows."""
    buckets = [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    while buckets[-1] < max_rows:
        buckets.append(buckets[-1] + 256)
    kept = [b for b in buckets if b < max_rows]
    return [*kept, max_rows]


class Graphs:
    """The captured steps of one device."""

    def __init__(
        self, forward: Forward, inputs: InputBuilder, *, max_rows: int, max_seq_len: int, max_tokens: int, device: torch.device
    ) -> None:
        self.forward = forward
        self.inputs = inputs
        self.max_seq_len = max_seq_len
        self.row_buckets = row_buckets(max_rows)
        self.token_buckets = [b for b in _TOKEN_BUCKETS if b <= max_tokens]
        self.mixed_rows = sorted({min(r, max_rows) for r in _MIXED_ROWS})
        blocks = inputs.tables.table.shape[1]
        most_tokens = max([*self.token_buckets, max_rows])
        self._static = torch.zeros(static_buffer_size(most_tokens, max_rows, blocks), dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, blocks, dtype=torch.int32, device=device)
        self._captured: dict[tuple[Shape, bool], Captured] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The padded shape whose graph runs `plan`; None: it runs without one."""
        num_rows = len(plan)
        if num_rows == plan.num_decodes:
            bucket = self.row_buckets[bisect.bisect_left(self.row_buckets, num_rows)]
            return Shape(bucket, bucket, is_decode=True)
        token_at = bisect.bisect_left(self.token_buckets, plan.num_tokens)
        row_at = bisect.bisect_left(self.mixed_rows, num_rows)
        if token_at == len(self.token_buckets) or row_at == len(self.mixed_rows):
            return None
        return Shape(self.token_buckets[token_at], self.mixed_rows[row_at], is_decode=False)

    def run(self, packed: Packed, all_greedy: bool) -> Tensor:
        """Copy the inputs in and replay. Returns the token ids of the shape's rows."""
        shape = packed.shape
        captured = self._captured.get((shape, all_greedy)) or self.capture(shape, all_greedy)
        self.inputs.unpack(packed, self._static, self._tables[: shape.rows])
        captured.graph.replay()
        return captured.token_ids

    def capture(self, shape: Shape, all_greedy: bool) -> Captured:
        """Record the step of a shape. The first run outside the graph compiles kernels and sizes the libraries' workspaces."""
        step = self._blank(shape)
        batch = step.batch
        # One stream for all: a library's workspace belongs to a stream, and stays.
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _nothing_collected():
            self.forward(batch, step.rows, step.counters, all_greedy)
            batch.shared.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                token_ids = self.forward(batch, step.rows, step.counters, all_greedy)
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or graph.pool()
        self._captured[shape, all_greedy] = Captured(graph, token_ids, shape.rows)
        return self._captured[shape, all_greedy]

    def trace(self, shape: Shape, all_greedy: bool) -> None:
        """Launch what `capture` would record: on meta tensors, for the list of kernels."""
        step = self._blank(shape)
        self.forward(step.batch, step.rows, step.counters, all_greedy)

    def warm_up(self) -> int:
        """Capture the decode buckets and the short prefills, greedy and sampled; rarer shapes follow when a step asks for them.

        Returns bytes taken.
        """
        started = time.monotonic()
        taken = self._take([*self._decodes(), *self._prefills()])
        log.info("captured %d graphs in %.1f s", len(self._captured), time.monotonic() - started)
        return taken

    def footprint(self) -> int:
        """Bytes that `warm_up` is going to take: what the largest graphs do, and for each other one what the smallest takes beside them.

        Nothing stays captured.
        """
        decodes, prefills = self._decodes(), self._prefills()
        largest = self._take([*decodes[:1], *prefills[:1]])
        others = max(len(decodes) + len(prefills) - 2, 0)
        taken = largest + (others * self._take(decodes[-1:]) if others else 0)
        self._captured.clear()
        self._pool = None
        return taken

    def _decodes(self) -> list[Shape]:
        """The largest first: later graphs live in the memory it took."""
        return [Shape(rows, rows, is_decode=True) for rows in reversed(self.row_buckets)]

    def _prefills(self) -> list[Shape]:
        return [Shape(tokens, self.mixed_rows[0], is_decode=False) for tokens in reversed(self.token_buckets)]

    def _take(self, shapes: list[Shape]) -> int:
        """Capture them, greedy and sampled. Returns bytes taken from the device."""
        before = _unused()
        for shape in shapes:
            for all_greedy in (True, False):
                self.capture(shape, all_greedy)
        return max(before - _unused(), 0)

    def _blank(self, shape: Shape) -> StepInputs:
        """A step of padding in the fixed buffers."""
        return fill_dummy_step(self._static, self._tables, shape, Bounds.of_graph(shape, self.max_seq_len), self.inputs.num_rows)
